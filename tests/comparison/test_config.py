"""Comparisons as recipes: kinds of arms, settings per dataset and per arm, and wrong keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ssl_vit import recipe
from ssl_vit.cli import compare
from ssl_vit.comparison import plan
from ssl_vit.comparison.config import load_comparison
from ssl_vit.comparison.plan import Plan
from ssl_vit.comparison.sets import ComparisonData, load_suite, suites
from ssl_vit.evaluators import fine_tune
from ssl_vit.interfaces import UserError
from tests.shipped import comparisons

from .conftest import Mini


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["evaluators.knn={seeds: [1]}"], "evaluators.knn.seeds"),
        (["evaluators={kn: {}}"], "did you mean 'knn'"),
        (["arms.ssl.evaluators={knn: {kk: 1}}", "evaluators.knn={}"], r"arms\.ssl\.evaluators\.knn\.kk: unknown key"),
        (["arms.ssl.evaluators={fine_tune: {held_out: 0.3}}"], "arms.ssl.evaluators.fine_tune.held_out: .*same images"),
        (["arms.ssl.evaluators={few_shot: {labels_per_class: [1]}}"], "arms.ssl.evaluators.few_shot.labels_per_class"),
        (["arms.ssl.evaluators={few_shot: {seeds: [1]}}"], "arms.ssl.evaluators.few_shot.seeds"),
        (["arms.ssl.evaluators={fine_tune: {held_out_repeats: 2}}"], "arms.ssl.evaluators.fine_tune.held_out_repeats"),
        (
            ["arms.ssl.evaluators={fine_tune: {sweep_labels_per_class: 5}}"],
            "sweep_labels_per_class: .*remove",
        ),
        (["arms.scratch.evaluators={fine_tuen: {lanes: 3}}"], r"arms\.scratch\.evaluators: .*did you mean 'fine_tune'"),
        (
            ["arms.scratch.evaluators={attentive_probe: {stepz: 3}}"],
            r"arms\.scratch\.evaluators\.attentive_probe\.stepz",
        ),
        (
            ["data.folds=[]", "data.sets={a: {train: x, test: y, evaluators: {knnn: {}}}}"],
            r"data\.sets\.a\.evaluators: ",
        ),
        (["evaluators.fine_tune.sweep={held_out: [0.1, 0.2]}"], "sweep.held_out"),
        (["evaluators.fine_tune.sweep={optim.lr.x: [1]}"], "sweep.optim.lr.x.*no such key"),
        (["arms.scratch.like=nobody"], "scratch.like=nobody"),
        (["arms={a b: {label: x, recipe: digits_ssl}}"], "'a b'"),
        (["arms={pixels: {label: x, recipe: digits_ssl}}"], "'pixels'"),
        (["arms={a: {label: x, recipe: digits_ssl}, untrained_a: {label: x}}"], "'untrained_a'"),
        (["arms={tasks: {label: x, recipe: digits_ssl}}"], "'tasks'"),
        (["arms.ssl.weights=x"], "weights is for arms of kind weights"),
        (["arms.scratch.compute_of=none"], "compute_of=none"),
        (["arms.scratch.compute_of=scratch"], "no arm with a recipe"),
        (["baseline=suprvised"], "baseline=suprvised: no arm has this name"),
        (["baseline=ssl", "arms.supervised=null"], "baseline=ssl: .*no other one has a recipe or weights"),
        (["arms.ssl.compute_of=ssl"], "compute_of is for arms of kind scratch"),
        (["arms.ssl.architecture=resnet18"], "architecture is for arms of kind weights"),
        (["arms.scratch.overrides=[encoder.depth=7]"], "overrides is for arms of kind pretrained"),
        (["arms.ssl.overrides=[probe.every=5,probe.patience=2]"], "probe.patience"),
        (["arms.ssl.run=runs/mine"], r"arms\.ssl: remove run and name; .*arms\.ssl\.weights=PATH"),
        (["seeds=[-1]"], "seeds.0"),
        (["run=s3://bucket/run"], "run: .*give a path of this machine, not a URL"),
        (["data.remote.cache_dir=s3://bucket/run"], r"remote\.cache_dir: .*not a URL"),
        (["seeds=[1,0,1]"], "seeds: 1"),
        (["labels_per_class=[10,zero]"], "labels_per_class.1"),
        (["labels_per_class=[all,'100%']"], "labels_per_class: all"),
        (["data.suite=transfer"], "give train and test, or folds, or sets, or suite"),
        (["data.train=c"], "give train and test, or folds, or sets, or suite"),
        (["data.folds=[]", "data.sets={a: {source: digits, train: x}}"], "data.sets.a: give either train and test"),
        (["data.folds=[a]"], "at least two different"),
        (["data.folds=[a,b,a]"], "at least two different"),
        (["data.folds=[a,b]", "data.pretrain=c"], "data: pretrain"),
        (["data.folds=[a,b]", "arms.ssl.overrides=[data.train=c]"], "arms.ssl: .*remove data.train"),
        (["data.sets={a: {train: x}}"], "data.sets.a: give either train and test"),
    ],
)
def test_wrong_comparisons_are_named(keys: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_comparison("demo_digits", keys)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"evaluators": {}}, "evaluators"),
        ({"arms": {"only": {"label": "x"}}}, "no arm has a recipe or weights"),
        ({"data": {}}, "give train and test, or folds, or sets, or suite"),
        ({"data": {"suite": "transfers"}}, "transfers: no such suite; shipped suites: .*transfer"),
    ],
)
def test_what_is_missing_is_named(mini: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_comparison(mini(**changes))


@pytest.mark.parametrize("arms", [["a", "b"], "hello"])
def test_arms_that_are_no_mapping_have_nothing_merged_onto_them(tmp_path: Path, arms: object) -> None:
    (tmp_path / "c.yaml").write_text(json.dumps({"name": "c", "arms": arms}))
    with pytest.raises(UserError, match="arms"):
        load_comparison(tmp_path / "c.yaml", ["arms.scratch.label=x"])


def test_settings_of_a_set_and_of_an_arm_are_merged_into_those_of_all(mini: Any) -> None:
    place = {"train": "a", "test": "b"}
    sets = {"one": place, "other": {**place, "evaluators": {"fine_tune": {"augment": {"flip": True}}}}}
    arms = {
        "ssl": {"label": "SSL", "recipe": "digits_ssl", "evaluators": {"fine_tune": {"training": {"batch_size": 64}}}},
        "scratch": {"label": "scratch"},
    }
    tuning = {"augment": {"scale": [0.5, 1.0], "flip": False}, "training": {"batch_size": 32}}
    study = load_comparison(mini(data={"sets": sets}, arms=arms, evaluators={"fine_tune": tuning}))

    def found(data: str, arm: str) -> tuple[Any, ...]:
        config: Any = study.evaluators[data, "fine_tune", arm]
        return config.augment.flip, config.augment.scale, config.training.batch_size

    assert found("one", "scratch") == (False, (0.5, 1.0), 32)
    assert found("other", "scratch") == (True, (0.5, 1.0), 32)
    assert found("other", "ssl") == (True, (0.5, 1.0), 64)


def test_an_empty_sweep_replaces_another(mini: Any) -> None:
    sweep = {"optim.lr": [0.1, 0.2]}
    arms = {"ssl": {"label": "ssl", "recipe": "digits_ssl"}, "scratch": {"label": "scratch"}}
    arms["scratch"]["evaluators"] = {"fine_tune": {"sweep": {}}}  # type: ignore[assignment]
    study = load_comparison(mini(arms=arms, evaluators={"fine_tune": {"sweep": sweep}}))
    found = {arm: len(one.candidates) for (_, _, arm), one in study.evaluators.items()}  # type: ignore[attr-defined]
    assert found == {"": 2, "ssl": 2, "scratch": 1}
    study = load_comparison(
        mini(arms=arms, evaluators={"fine_tune": {"sweep": sweep}}), ["evaluators.fine_tune.sweep={}"]
    )
    assert {len(one.candidates) for one in study.evaluators.values()} == {1}  # type: ignore[attr-defined]


def test_one_value_replaces_the_values_of_a_sweep(mini: Any) -> None:
    sweep = {"optim.lr": [0.1, 0.2], "training.steps": [3, 4], "head.mixup": [0.0, 0.2]}
    arms = {"ssl": {"recipe": "digits_ssl"}, "scratch": {"evaluators": {"fine_tune": {"optim": {"lr": 0.5}}}}}
    path = mini(arms=arms, evaluators={"fine_tune": {"sweep": sweep}})
    given = ["evaluators.fine_tune.training.epochs=2", "evaluators.fine_tune.head.label_smoothing=0.1"]
    configs = {arm: one for (_, _, arm), one in load_comparison(path, given).evaluators.items()}
    assert configs["ssl"].sweep.keys() == {"optim.lr", "head.mixup"}  # type: ignore[attr-defined]
    assert configs["scratch"].sweep.keys() == {"head.mixup"}  # type: ignore[attr-defined]
    assert configs["scratch"].optim.lr == 0.5 and configs["ssl"].training.epochs == 2  # type: ignore[attr-defined]
    own = {"evaluators": {"fine_tune": {"sweep": {"head.mixup": [0.1, 0.2]}}}}
    path = mini(arms={**arms, "scratch": own}, evaluators={"fine_tune": {"sweep": sweep}})
    study = load_comparison(path, ["arms.scratch.evaluators.fine_tune.head.mixup=0.4"])
    kept = {arm: one.sweep.keys() for (_, _, arm), one in study.evaluators.items()}  # type: ignore[attr-defined]
    assert kept["scratch"] == {"optim.lr", "training.steps"} and kept["ssl"] == sweep.keys()


def test_a_sweep_may_be_nested_or_dotted(mini: Any) -> None:
    """Shipped recipes use dotted keys, and the command line nests them."""
    given = "evaluators.fine_tune.sweep.training.steps=[100,400]"
    study = load_comparison("cifar10_cpu", [given])
    sweeps = {arm: one.sweep for (_, name, arm), one in study.evaluators.items() if name == "fine_tune"}  # type: ignore[attr-defined]
    assert sweeps["ssl"]["training.steps"] == (100, 400)
    assert sweeps["scratch_compute"]["training.steps"] == (200,), "an arm's own settings come last"
    nested = {"evaluators": {"fine_tune": {"sweep": {"optim": {"lr": [0.1]}, "training": {"steps": [3]}}}}}
    over = ["evaluators.fine_tune.sweep={optim.lr: [0.5], training.epochs: [7]}"]
    (config,) = {
        one.model_dump_json(): one for one in load_comparison(mini(**nested), over).evaluators.values()
    }.values()
    assert config.sweep == {"optim.lr": (0.5,), "training.epochs": (7,)}  # type: ignore[attr-defined]


def test_null_removes_data() -> None:
    found = load_comparison("demo_digits", ["data.folds=null", "data.sets=null", "data.train=a", "data.test=b"])
    assert (found.comparison.data.folds, found.sets["data"].train, found.sets["data"].test) == ((), "a", "b")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["data=a"], "a#train"),
        (["data=a", "arms.ssl.data=b"], "b#train"),
        (["data=a", "arms.ssl.overrides=['data=b']"], "b#train"),
        (["data=a", "arms.ssl.data.train=b"], "b"),
        (["arms.ssl.overrides=['data=b','data.train=c']", "data=a"], "c"),
    ],
)
def test_the_last_place_of_an_arms_data_applies(keys: list[str], expected: str) -> None:
    study = load_comparison("own_images_cpu", keys)
    assert study.recipes["ssl"].data.train == expected and study.recipes["supervised"].data.train == "a#train"


def test_the_saved_comparison_finds_what_lay_beside_its_recipe(mini: Any, tmp_path: Path) -> None:
    for folder in ("own", "run"):
        (tmp_path / folder).mkdir()
    (tmp_path / "own" / "pre.yaml").write_text("base: digits_ssl\n")
    (tmp_path / "own" / "sets.yaml").write_text("sets: {one: {train: x, test: y}}\n")
    arms = {"ssl": {"label": "ssl", "recipe": "pre"}, "all": {"label": "all labels", "recipe": "digits_supervised"}}
    recipe_file = mini(arms=arms, data={"suite": "sets.yaml"}).rename(tmp_path / "own" / "mine.yaml")
    study = load_comparison(recipe_file)
    saved = tmp_path / "run" / "comparison.yaml"
    saved.write_text(yaml.safe_dump(study.given))
    again = load_comparison(saved.parent)
    assert again.recipes == study.recipes and again.sets == study.sets
    assert again.comparison.arms["all"].recipe == "digits_supervised"
    (tmp_path / "other").mkdir()
    derived = tmp_path / "other" / "derived.yaml"
    derived.write_text("base: ../own/mine.yaml\n")
    (tmp_path / "other" / "pre.yaml").write_text("base: digits_supervised\n")
    assert load_comparison(derived).recipes == study.recipes and load_comparison(derived).sets == study.sets


def test_the_saved_comparison_keeps_the_defaults_of_each_arms_protocol(mini: Any, tmp_path: Path) -> None:
    own = {"fine_tune": {"protocol": "mae"}, "linear_probe": {"method": "lars"}}
    arms = {
        "ssl": {"label": "ssl", "recipe": "digits_ssl", "evaluators": own},
        "other": {"label": "other", "recipe": "digits_ssl", "evaluators": {"fine_tune": {"optim": {"lr": 0.5}}}},
    }
    for keys in ([], ["quick=true"]):
        given = mini(arms=arms, evaluators={"fine_tune": {}, "linear_probe": {}, "few_shot": {}})
        study = load_comparison(given, keys)
        saved = tmp_path / "saved.yaml"
        saved.write_text(yaml.safe_dump(study.given))
        assert load_comparison(saved).evaluators == study.evaluators


def test_settings_of_a_suite_are_for_its_protocol_alone(mini: Any, tmp_path: Path) -> None:
    own = {"train": "a", "test": "b", "evaluators": {"fine_tune": {"training": {"steps": 77}}}}
    (tmp_path / "one.yaml").write_text(json.dumps({"sets": {"one": own}}))
    for protocol, data, expected in (
        ("paper", {"suite": "one.yaml"}, 77),
        ("mae", {"suite": "one.yaml"}, None),
        ("mae", {"sets": {"one": own}}, 77),  # written for this comparison
    ):
        study = load_comparison(mini(data=data, evaluators={"fine_tune": {"protocol": protocol}}))
        config: Any = study.evaluators["one", "fine_tune", "ssl"]
        assert config.training.steps == expected, (protocol, data)


def test_a_suite_chooses_the_images_of_every_protocol(mini: Any, tmp_path: Path) -> None:
    own = {"train": "a", "test": "b", "evaluators": {"fine_tune": {"held_out": 0.3, "labels_per_class": [7]}}}
    (tmp_path / "one.yaml").write_text(json.dumps({"sets": {"one": own}}))
    study = load_comparison(
        mini(data={"suite": "one.yaml"}, evaluators={"fine_tune": {}}),
        ["arms.scratch.evaluators.fine_tune.protocol=mae"],
    )
    for arm, protocol in (("ssl", "paper"), ("scratch", "mae")):
        config: Any = study.evaluators["one", "fine_tune", arm]
        assert (config.protocol, config.held_out, config.labels_per_class) == (protocol, 0.3, (7,))


def fine_tuning(suite: str) -> dict[str, Any]:
    """Steps, warm-up, held-out share and learning rates of each set of a suite."""
    found = {}
    for name, chosen in load_suite(suite).sets.items():
        config = recipe.validate(fine_tune.Config, chosen.evaluators.get("fine_tune", {}))
        assert (config.optim.name, config.optim.momentum, config.optim.weight_decay) == ("sgd", 0.9, 0.0)
        assert (config.training.batch_size, config.optim.clip_norm, config.optim.schedule) == (512, 1.0, "cosine")
        rates = tuple(settings["optim.lr"] for settings in config.candidates)
        found[name] = (config.training.steps, config.optim.warmup_steps, config.held_out, rates)
    return found


def test_the_shipped_suites_are_whole(tmp_path: Path) -> None:
    assert "local" in suites()
    for name in suites():
        for key, chosen in load_suite(name).sets.items():
            assert chosen.source or chosen.train, key
    small, large = (0.001, 0.003, 0.01, 0.03), (0.003, 0.01, 0.03, 0.06)
    expected = {  # paper, table 4 and appendix B.1.1: steps, warm-up, held-out share, learning rates
        "cifar10": (10_000, 500, 0.02, small),
        "cifar100": (10_000, 500, 0.02, small),
        "pets": (500, 100, 0.1, small),
        "flowers102": (500, 100, 0.1, small),
        "imagenet": (20_000, 500, 0.01, large),
    }
    assert fine_tuning("transfer") == expected
    assert set(fine_tuning("vtab_like").values()) == {(2_500, 500, 0.1, small)}
    wrong = tmp_path / "wrong.yaml"
    for sets, words in (
        ("{x: {source: digits, evaluators: {knn: {kk: 1}}}}", r"sets\.x\.evaluators\.knn\.kk: unknown key"),
        ("[a]", "sets: "),
        ("{a: 5}", r"sets\.a: "),
        ("{a: {source: digits, evaluators: [knn]}}", r"sets\.a\.evaluators: "),
    ):
        wrong.write_text(f"sets: {sets}")
        with pytest.raises(UserError, match=words):
            load_suite(str(wrong))


def test_a_home_directory_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "own.yaml").write_text("folder: packed\nsets: {one: {source: digits}}\n")
    assert load_comparison("demo_digits", ["data.folds=[]", "data.suite=~/own.yaml"]).folder == Path("packed")
    keys = ["run=~/mine", "data.folder=~/sets", "arms.given={label: given, weights: ~/runs/x}"]
    study = load_comparison("demo_digits", keys)
    assert study.comparison.run_directory == tmp_path / "mine" and study.folder == tmp_path / "sets"
    assert study.comparison.arms["given"].weights == f"{tmp_path}/runs/x"


@pytest.mark.parametrize("key", ["weights", "recipe"])
def test_an_arm_without_the_weights_that_it_names_is_refused(key: str) -> None:
    """It would be trained from scratch."""
    for value, words in (("", "value is missing"), ('""', "at least 1 character")):
        with pytest.raises(UserError, match=rf"arms\.mine\.{key}.*{words}"):
            load_comparison("demo_digits", ["arms.mine.label=mine", f"arms.mine.{key}={value}"])


def test_two_arms_need_two_labels() -> None:
    with pytest.raises(UserError, match="two arms have the label 'scratch'"):
        load_comparison("demo_digits", ["arms.ssl.label=scratch"])


@pytest.mark.parametrize("label", ["raw pixels", "the untrained encoder"])
def test_an_arm_is_not_named_like_a_reference(label: str) -> None:
    with pytest.raises(UserError, match=f"the label '{label}' is that of a reference"):
        load_comparison("demo_digits", [f"arms.ssl.label={label}"])


@pytest.mark.parametrize("place", ["1001", "a: b", "mine, too", "[a]", "a # b", "größe"])
def test_paths_may_look_like_numbers_and_lists(
    mini: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    study = load_comparison(mini(data={"train": f"{place}/train", "test": f"{place}/test"}))
    assert study.recipes["ssl"].data.train == f"{place}/train"
    assert load_comparison(mini(data={"train": place, "test": "x"})).recipes["ssl"].data.train == place
    given = load_comparison(mini(), [f'arms.given.weights="{place}"'])
    assert given.comparison.arms["given"].weights == place
    monkeypatch.chdir(tmp_path)
    for fold in range(5):
        (tmp_path / place / "data" / f"fold_{fold}").mkdir(parents=True)
        (tmp_path / place / "data" / f"fold_{fold}" / "info.json").touch()
    asked: list[list[str]] = []
    monkeypatch.setattr(compare, "_compare", lambda name, overrides, command: asked.append(overrides))
    compare.demo(Path(place), None)
    demo = load_comparison("demo_digits", asked[0])
    assert demo.comparison.run_directory == Path(place) and demo.folds[0].test == f"{place}/data/fold_0"


def test_a_protocol_is_not_swept() -> None:
    with pytest.raises(UserError, match=r"sweep\.protocol: it sets defaults of other keys"):
        load_comparison("demo_digits", ["evaluators.fine_tune.sweep.protocol=[paper,mae]"])
    with pytest.raises(UserError, match=r"sweep\.method: it sets defaults of other keys"):
        load_comparison("demo_digits", ["evaluators.linear_probe={sweep: {method: [exact, lars]}}"])


@pytest.mark.parametrize("own", [True, False])
def test_labeled_data_is_read_as_the_comparison_says(own: bool) -> None:
    keys = ["arms.ssl.data.remote.retries=3"] + (["data.remote.retries=7"] if own else [])
    study = load_comparison("demo_digits", keys)
    assert study.remote.retries == (7 if own else 3)
    assert study.recipes["ssl"].data.remote.retries == 3, "what an arm says comes first"
    assert study.recipes["supervised"].data.remote.retries == (7 if own else 5)


def test_a_resumed_comparison_keeps_what_a_recipe_says_about_remote_data(mini: Any, tmp_path: Path) -> None:
    recipe = tmp_path / "cached.yaml"
    recipe.write_text("base: digits_ssl\nname: cached\ndata: {remote: {cache_dir: here}}\n")
    arms = {"ssl": {"label": "SSL", "recipe": str(recipe)}}
    study = load_comparison(mini(arms=arms), ["data.remote.retries=7"])
    (saved := tmp_path / "run").mkdir()
    (saved / "comparison.yaml").write_text(yaml.safe_dump(study.given))
    for loaded in (study, load_comparison(saved)):
        remote = loaded.recipes["ssl"].data.remote
        assert (remote.cache_dir, remote.retries) == ("here", 7)


def test_shipped_comparisons_have_tasks_and_equal_effort_for_all_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rates of fine-tuning and one dropout. The demo declares its settings itself; the searches for rates of
    pretraining have one rate of fine-tuning, and some comparisons have the rates that earlier ones selected."""
    selected_before = (
        "photos_longest_cpu",
        "photos_mae_regularized_cpu",
        "photos_masked_patch_cpu",
        "photos_masked_patch_supervised_cpu",
        "photos_methods_repeated_cpu",
        "cifar10_lejepa_long_cpu",
        "cifar10_methods_repeated_cpu",
        "cifar10_mae_supervised_10_labels_cpu",
        "cifar10_mae_supervised_regularized_10_labels_cpu",
        "cifar10_mae_supervised_1000_labels_cpu",
        "cifar10_mae_supervised_cpu",
        "cifar10_mae_supervised_long_cpu",
        "cifar10_mae_supervised_long_10_labels_cpu",
        "cifar10_mae_supervised_long_1000_labels_cpu",
        "cifar10_mae_rand_augment_cpu",
        "cifar10_mae_selected_lengths_cpu",
        "cifar10_mae_repeated_10_labels_cpu",
        "cifar10_mae_repeated_100_labels_cpu",
        "cifar10_mae_repeated_1000_labels_cpu",
        "cifar10_mae_long_regularized_cpu",
        "cifar10_mae_long_regularized_10_labels_cpu",
        "cifar10_mae_long_regularized_1000_labels_cpu",
        "cifar10_masked_patch_regularized_cpu",
        "cifar10_masked_patch_supervised_cpu",
        "cifar10_masked_patch_supervised_10_labels_cpu",
        "cifar10_masked_patch_supervised_1000_labels_cpu",
        "cifar10_masked_patch_supervised_long_cpu",
        "cifar10_masked_patch_supervised_long_10_labels_cpu",
        "cifar10_masked_patch_supervised_long_1000_labels_cpu",
        "cifar10_masked_patch_long_regularized_cpu",
        "cifar10_masked_patch_regularized_10_labels_cpu",
        "cifar10_masked_patch_regularized_1000_labels_cpu",
        "cifar10_masked_patch_regularized_repeated_cpu",
        "cifar10_methods_regularized_cpu",
        "cifar10_all_methods_regularized_cpu",
        "cifar10_methods_regularized_10_labels_cpu",
        "cifar10_methods_regularized_1000_labels_cpu",
    )
    others = ("demo_digits", "own_images_rates_cpu", "cifar10_rates_cpu", *selected_before)
    swept, rates_of_dropout = 0, dict[str, dict[str, float]]()
    monkeypatch.setattr(plan, "fingerprint", lambda *_: "")  # takes most of the time
    for name in comparisons():
        arms = (yaml.safe_load(recipe.shipped()[name].read_text()).get("arms") or {}).items()
        study = load_comparison(name, [f"arms.{arm}=null" for arm, one in arms if one and "weights" in one])
        assert "measure" in {task.kind for task in Plan(study).tasks}, name
        kept = rates_of_dropout[name] = {arm: settings.encoder.dropout for arm, settings in study.recipes.items()}
        if name in others:
            continue
        found = {key: config for key, config in study.evaluators.items() if key[1] == "fine_tune"}
        dropouts = {arm: config.model_dump()["dropout"] for (_, _, arm), config in found.items() if arm in kept}
        assert len({kept[arm] if rate is None else rate for arm, rate in dropouts.items()}) <= 1, name
        for (_, _, arm), config in found.items():
            rates = config.model_dump()["sweep"].get("optim.lr", (0, 0, 0))
            assert len(rates) >= 3, f"{name}: {arm}"
            swept += len(rates)
    assert swept
    kept = rates_of_dropout["cifar10_cpu"]
    assert kept["supervised"] != kept["ssl"], "so the key matters"


def test_epochs_replace_the_steps_of_a_recipe_and_the_other_way_round(mini: Any) -> None:
    fine_tune = {"training": {"steps": 9, "batch_size": 7}, "sweep": {"optim.lr": [0.1]}}
    recipe = mini(evaluators={"fine_tune": fine_tune})
    arm = ["arms.ssl.evaluators.fine_tune.training.steps=5", "evaluators.fine_tune.training.epochs=3"]
    found = load_comparison(recipe, arm).evaluators
    lengths = {of: (config.training.steps, config.training.epochs) for (_, _, of), config in found.items()}  # type: ignore[attr-defined]
    assert lengths[""] == (None, 3) and lengths["ssl"] == (5, None)


def test_warm_up_steps_replace_the_warm_up_epochs_of_a_recipe(mini: Any) -> None:
    recipe = mini(evaluators={"fine_tune": {"warmup_epochs": 5, "optim": {"warmup_steps": 3}}})
    for given, expected in (([], (5, 3)), (["evaluators.fine_tune.optim.warmup_steps=7"], (None, 7))):
        (config,) = [config for (_, _, of), config in load_comparison(recipe, given).evaluators.items() if not of]
        assert (config.warmup_epochs, config.optim.warmup_steps) == expected  # type: ignore[attr-defined]


def test_other_data_keeps_the_metric(mini: Mini) -> None:
    path = mini(data={"train": "a", "test": "b", "metric": "mean_per_class"})
    (chosen,) = load_comparison(path, ["data=elsewhere"]).sets.values()
    assert (chosen.train, chosen.metric) == ("elsewhere#train", "mean_per_class")
    (chosen,) = load_comparison(path, ["data=elsewhere", "data.metric=accuracy"]).sets.values()
    assert chosen.metric == "accuracy"


@pytest.mark.parametrize("data", [{"train": "x"}, {"folds": ("x", "y")}])
def test_every_fold_has_the_metric_of_the_comparison(data: dict[str, Any]) -> None:
    assert {one.metric for one in ComparisonData(**data, metric="mean_per_class").splits} == {"mean_per_class"}
