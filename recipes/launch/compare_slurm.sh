#!/bin/bash
# A comparison on a Slurm cluster: every piece a task of an array, stage after stage; the report at the end.
#
# recipes/launch/compare_slurm.sh own_images data.train=shards/train data.test=shards/test run=/shared/runs/mine
#
# Say what a task needs by Slurm's own variables, such as SBATCH_PARTITION=gpu SBATCH_GPUS=1 SBATCH_TIMELIMIT=240. The run
# directory must be on a file system that all nodes share. Run it again after a failure: what is done stays done.
# Run by the tests with a stand-in for sbatch.
set -euo pipefail

list=$(ssl-vit compare "$@" --list)
run=$(sed -n 's/^# run: //p' <<< "$list")
after=()
for stage in $(awk -F'\t' '!/^#/ {print $2}' <<< "$list" | sort -nu); do
    mkdir -p "$run/pieces"
    ids=$(mktemp "$run/pieces/stage_${stage}_XXXXXX.txt") # a list of its own: tasks of an earlier call may still wait
    awk -F'\t' -v stage="$stage" '!/^#/ && $2 == stage && $3 == "missing" {print $1}' <<< "$list" > "$ids"
    count=$(wc -l < "$ids")
    ((count)) || { rm "$ids" && continue; }
    piece="\$(sed -n \"\$((SLURM_ARRAY_TASK_ID + 1))p\" ${ids@Q})"
    job=$(sbatch --parsable --requeue --array="0-$((count - 1))" "${after[@]}" \
        --wrap "exec ssl-vit compare ${*@Q} --only \"$piece\"")
    echo "stage $stage: $count piece(s), job $job"
    after=("--dependency=afterok:${job%%;*}")
done
sbatch --parsable "${after[@]/afterok/afterany}" --wrap "exec ssl-vit report ${run@Q}" > /dev/null
echo "in the end $run/report.html; until then, \`ssl-vit report $run\` shows whatever is finished"
