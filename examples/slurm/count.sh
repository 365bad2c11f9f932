#!/bin/sh
# Task i of an array counts the i-th of N shares of the rows of all traces RUN/part-*/trace:
#
#     sbatch --array=1-16 count.sh RUN 16
#
# N is given apart from the array, so that `--array=7 count.sh RUN 16` repeats one share that failed.
#SBATCH --job-name=smoe-count
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=16G
#SBATCH --requeue
set -eu
cd "$1"
share=$SLURM_ARRAY_TASK_ID/$2
set --
for trace in part-*/trace; do
    set -- "$@" --trace "$trace"
done
smoe build-tables "$@" --shard "$share" --jobs "$SLURM_CPUS_PER_TASK" --force -C .
