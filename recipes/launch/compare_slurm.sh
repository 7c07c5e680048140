#!/bin/bash
# A comparison on a Slurm cluster: one array job per level, one array element per task, then a report.
#
# recipes/launch/compare_slurm.sh own_images data.train=shards/train data.test=shards/test run=/shared/runs/mine
#
# Request resources with Slurm's own variables, such as SBATCH_PARTITION=gpu SBATCH_GPUS=1 SBATCH_CPUS_PER_GPU=8
# SBATCH_TIMELIMIT=240. All nodes must share the run directory. After a failure, run the same command again: finished tasks are
# kept.
# Status: tested with a mock of sbatch.
set -euo pipefail

list=$(ssl-vit compare "$@" --list)
run=$(sed -n 's/^# run: //p' <<< "$list")
after=()
for level in $(awk -F'\t' '!/^#/ {print $2}' <<< "$list" | sort -nu); do
    mkdir -p "$run/tasks"
    ids=$(mktemp "$run/tasks/level_${level}_XXXXXX.txt") # a new file: tasks of an earlier call may still be queued
    awk -F'\t' -v level="$level" '!/^#/ && $2 == level && $3 == "missing" {print $1}' <<< "$list" > "$ids"
    count=$(wc -l < "$ids")
    ((count)) || { rm "$ids" && continue; }
    task="\$(sed -n \"\$((SLURM_ARRAY_TASK_ID + 1))p\" ${ids@Q})"
    job=$(sbatch --parsable --requeue --kill-on-invalid-dep=yes --array="0-$((count - 1))" "${after[@]}" \
        --wrap "exec ssl-vit compare ${*@Q} --only \"$task\"")
    echo "level $level: $count task(s), job $job"
    after=("--dependency=afterok:${job%%;*}")
done
sbatch --parsable "${after[@]/afterok/afterany}" --wrap "exec ssl-vit report ${run@Q}" > /dev/null
echo "report: $run/report.html; before that, \`ssl-vit report $run\` shows the finished tasks"
