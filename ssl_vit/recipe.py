"""Recipes: YAML files, merged with `key=value` overrides by OmegaConf and validated by typed configurations.

A recipe with `base: NAME` (a shipped recipe or a file beside it) holds only what differs from that one.

Torch-free, but for the values of the configuration of the objective that a recipe names.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, Field, SerializeAsAny, ValidationError

from ssl_vit import arms, plugins
from ssl_vit.data import DataConfig, train_and_test
from ssl_vit.files import expanded, write_text
from ssl_vit.interfaces import Config, LocalPath, ObjectiveConfig, UnknownObjective, UserError, errors_about
from ssl_vit.keys import close_key, nested
from ssl_vit.models import EncoderConfig
from ssl_vit.overrides import MAX_BYTES, PLACE, Overrides, check_nesting, flatten, merge, parsed, without_references
from ssl_vit.training import OptimConfig, ProbeConfig, TrainingConfig

T = TypeVar("T", bound=BaseModel)


class Recipe(Config):
    """One training stage. Pretraining, supervised training and fine-tuning differ only in their recipes.

    name: name of the run.
    run: the run directory (default: runs/NAME).
    seed: seed of initialization, data order, augmentation and masking.
    init_from: a run, checkpoint or weights folder whose encoder this stage starts from.
    probe: a few-shot probe during training (None: none).
    """

    name: str = Field(min_length=1)
    run: LocalPath = ""
    seed: int = Field(0, ge=0, lt=2**31)  # each process derives its own
    init_from: Annotated[str, Field(min_length=1)] | None = None
    data: DataConfig
    encoder: EncoderConfig = EncoderConfig()
    objective: SerializeAsAny[ObjectiveConfig]
    optim: OptimConfig = OptimConfig()
    training: TrainingConfig
    probe: ProbeConfig | None = None

    @property
    def run_directory(self) -> Path:
        return expanded(self.run or f"runs/{self.name}")


def recipes_folder() -> Path:
    """The folder of the shipped recipes: inside the installed package, or beside it in a checkout."""
    inside = Path(__file__).parent / "recipes"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "recipes"


def shipped() -> dict[str, Path]:
    """Shipped recipes by name: the YAML files in the folder of each family."""
    paths = sorted(recipes_folder().glob("*/*.yaml"))
    return {path.stem: path for path in paths if path.parent.name not in ("launch", "suites")}


def find(name: str, near: Path | None = None) -> Path:
    """A recipe file: one beside the recipe `near`, a path, that of a run or comparison directory, or a shipped recipe's
    name.

    Raises UserError naming the closest shipped recipe.
    """
    beside = [near.parent / name, near.parent / f"{name}.yaml"] if near else []
    for path in [*beside, expanded(name), expanded(name) / "recipe.yaml", expanded(name) / "comparison.yaml"]:
        with suppress(OSError):  # a name that is too long
            if path.is_file():
                return path
    if name in shipped():
        return shipped()[name]
    close = get_close_matches(name, shipped(), n=1)
    hint = f"did you mean '{close[0]}'?" if close else "`ssl-vit recipes` lists the shipped recipes"
    raise UserError(f"{name}: no such recipe; {hint}")


def read(path: Path, overrides: Overrides = ()) -> dict[str, Any]:
    """A recipe file merged onto its `base`, then with overrides, as plain containers.

    Recipes are data: references such as `${oc.env:HOME}` are refused.
    Raises UserError naming the file or the override.
    """
    content = _onto(_open(path), parsed(overrides), str(path))
    return dict(OmegaConf.to_container(arms.with_absolute_paths(content, path, recipes_folder())))


def parse_overrides(overrides: Overrides) -> dict[str, Any]:
    """Overrides as a nested mapping."""
    return dict(OmegaConf.to_container(parsed(overrides)))


def _open(path: Path, above: tuple[Path, ...] = ()) -> DictConfig:
    """A recipe file merged onto its base. above: the recipes that led here, to detect a cycle."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_BYTES + 1)
        check_nesting(text)
        loaded = OmegaConf.load(io.StringIO(text))
    except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError) as error:
        raise UserError(f"{path}: not readable YAML: {error}") from None
    if not isinstance(loaded, DictConfig):
        raise UserError(f"{path}: a recipe must be a mapping of keys to values")
    loaded = arms.with_absolute_paths(without_references(loaded, str(path)), path, recipes_folder())
    base = loaded.pop("base", None)
    if base is None:
        return _onto(OmegaConf.create(), loaded, str(path))
    with errors_about(f"{path}: base"):
        under = find(str(base), path)
    if under.resolve() in {seen.resolve() for seen in (path, *above)}:
        raise UserError(f"{path}: base={base} is circular")
    return _onto(_open(under, (path, *above)), loaded, str(path))


def onto(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of an evaluator with others on top; steps and epochs replace each other, and `sweep` is one value."""
    kept = {key: value for key, value in under.items() if key != "sweep" or key not in over}
    return dict(OmegaConf.to_container(merge("suite", kept, dict(over))))


def _onto(under: DictConfig, over: DictConfig, origin: str) -> DictConfig:
    """`over` merged onto `under`. Objectives of different names replace each other.

    `null` removes an arm or an evaluator.
    """
    _expand_data(under, over)
    name = _section(over, "objective").get("name")
    if name is not None and name != _section(under, "objective").get("name"):
        under.pop("objective", None)
    evaluators, given_evaluators = (_section(one, "evaluators") for one in (under, over))
    for removed in [key for key, value in given_evaluators.items() if value is None]:
        if removed not in evaluators:
            raise UserError(f"{origin}: evaluators.{removed}=null: there are only {', '.join(evaluators) or 'none'}")
        del evaluators[removed], given_evaluators[removed]
    if _section(over, "arms"):
        before, given_arms = (dict(OmegaConf.to_container(one)).get("arms") or {} for one in (under, over))
        if not isinstance(before, dict):
            raise UserError(f"{origin}: the arms that these are merged onto are not a mapping of names to settings")
        over.arms, under.arms = arms.derived(before, given_arms, Recipe.model_fields), {}
    return merge(origin, under, over)


def _expand_data(under: DictConfig, over: DictConfig) -> None:
    """`data=PLACE` of a training recipe is `data.train`; of a comparison both parts, in place of all other data. The
    metric stays."""
    rest = _section(over, "data")
    if "data" in over and not isinstance(over.data, str | DictConfig):
        raise UserError(f"data={over.data}: name a folder, a dataset or shards, in quotes where it is a number")
    place = over.data if isinstance(over.get("data"), str) else rest.pop(PLACE, None) if rest else None
    comparison = "arms" in under or "arms" in over
    if place is not None:
        parts = dict(zip(("train", "test"), train_and_test(place), strict=True))
        if comparison:
            metric = {key: value for key, value in _section(under, "data").items() if key == "metric"}
            under.pop("data", None)
            over.data = {**parts, **metric, **rest} if metric or rest else place
        else:
            over.data = {"train": parts["train"], **rest}
    elif isinstance(under.get("data"), str) and not {"train", "sets", "suite", "folds"} & {*rest}:
        under.data = dict(zip(("train", "test"), train_and_test(under.data), strict=True))


def _section(content: DictConfig, key: str) -> Any:
    section = content.get(key)
    return section if isinstance(section, DictConfig) else {}


def load_recipe(name: str | Path, overrides: Overrides = (), near: Path | None = None, trains: bool = True) -> Recipe:
    """Read and validate a training recipe, or that of a run directory; only an objective's values need torch.

    trains: whether its objective must be importable; False makes it an `UnknownObjective` where it is not.
    Raises UserError naming each wrong key and, where there is a close one, the right key.
    """
    path = find(str(name), near)
    content = read(path, overrides)
    if "arms" in content and "arms" in read(path):  # not those of an override
        raise UserError(f"{path} is a comparison: run it with `ssl-vit compare {name}`")
    objective = content.get("objective")
    if not isinstance(objective, dict) or "name" not in objective:
        raise UserError(f"{path}: objective.name is missing, such as masked_patch")
    if path == expanded(name) / "recipe.yaml" and "run" not in parse_overrides(overrides):
        content["run"] = str(name)  # the directory may have been moved or renamed since
    named = str(objective["name"])
    validate(Recipe, content | {"objective": ObjectiveConfig(name=named)}, f"{path}: ", given=overrides)
    try:
        config = plugins.load("objectives", named).Config
    except UserError:
        if trains:
            raise
        config = UnknownObjective
    content["objective"] = validate(config, objective, f"{path}: ", "objective.", overrides)
    return validate(Recipe, content, f"{path}: ", given=overrides)


def run_of(weights: Path) -> Path:
    """The run directory of a checkpoint; any other path is returned with `~` expanded."""
    weights = expanded(weights)
    if (weights / "recipe.yaml").is_file():
        return weights
    checkpoints = weights.resolve().parent
    return checkpoints.parent if checkpoints.name == "checkpoints" else weights


def run_recipe(weights: Path) -> Recipe | None:
    """The recipe of a run directory, or of the run of a checkpoint, if any. Its objective need not be importable."""
    path = run_of(weights) / "recipe.yaml"
    return load_recipe(path, trains=False) if path.is_file() else None


def stages(settings: Recipe) -> list[Recipe]:
    """The recipe, then those of the runs that it starts from through `init_from`, as far as they are known."""
    found, started = [settings], set[str]()
    while (start := found[-1].init_from) and start not in started and (before := run_recipe(Path(start))):
        started.add(start)
        found.append(before)
    return found


def training_places(settings: Recipe) -> list[str]:
    """The training data of a recipe and of all runs that it starts from through `init_from`, and the data that stopped
    them early."""
    read = [place for one in stages(settings) for place in one.data.places]
    return read + [one.probe.data for one in stages(settings) if one.probe and one.probe.patience and one.probe.data]


def needs_labels(settings: Recipe) -> bool:
    """Whether a recipe's objective is trained with labels."""
    return bool(plugins.load("objectives", settings.objective.name).Objective.needs_labels)


def save(config: Config, path: Path) -> None:
    """Write the resolved recipe so that `train PATH` repeats it."""
    write_text(path, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True))


def differences(old: Config, new: Config, ignore: Sequence[str] = ()) -> list[str]:
    """Keys that differ between two resolved recipes, as `key: old -> new`. ignore: keys (with those below) to skip."""
    flat_old, flat_new = flatten(old.model_dump(mode="json")), flatten(new.model_dump(mode="json"))
    return [
        f"{key}: {flat_old.get(key)} -> {flat_new.get(key)}"
        for key in sorted({*flat_old, *flat_new})
        if flat_old.get(key) != flat_new.get(key) and not any(f"{key}.".startswith(f"{name}.") for name in ignore)
    ]


def validate(model: type[T], content: Any, origin: str = "", section: str = "", given: Overrides = ()) -> T:
    """Build a typed configuration. Raises UserError with a line per problem: `origin`, the key, what is wrong.

    section: what precedes the keys of `content`. given: overrides; `origin` is omitted for what they set.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        lines, changed = [], flatten(parse_overrides(given))
        for problem in error.errors():
            place = [str(key) for key in problem["loc"]]
            keys = [key for key in place if not key.startswith("<")]  # <...>: one of several types
            if problem["type"] == "extra_forbidden" and keys[-1:] != place[-1:]:
                keys += place[-1:]  # the key itself, which begins with <
            where = section + ".".join(keys)
            if not any(f"{where}.".startswith(f"{key}.") or f"{key}.".startswith(f"{where}.") for key in changed):
                where = origin + where
            if problem["type"] == "extra_forbidden":
                inner = nested(model, keys[:-1])
                below = {"arms.*." if len(keys) == 1 else "": Recipe} if "arms" in model.model_fields else {}
                close = close_key(inner, keys[-1], below)
                hint = f"; did you mean '{close}'?" if close else f"; known: {', '.join(inner.model_fields)}"
                if "arms" in model.model_fields and not section and keys[0] in ("training", "optim", "encoder"):
                    hint = f"; for the arms' training recipes write arms.*.{keys[0]}"
                lines.append(f"{where}: unknown key{hint}")
            elif problem["type"] == "missing":
                lines.append(f"{where}: this key is missing")
            elif problem["type"] == "string_type":  # YAML made a number or a mapping of it
                lines.append(
                    f"{where}: give text, in two pairs of quotes on the command line: {'.'.join(keys)}=\"'...'\""
                )
            else:
                lines.append(f"{where.rstrip('.: ')}: {problem['msg'].removeprefix('Value error, ')}")
        raise UserError("\n".join(lines)) from None
