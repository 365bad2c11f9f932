#!/bin/sh
# Task i of an array records RUN/prompts-i.jsonl, on all GPUs of its node, into RUN/part-i/trace:
#
#     sbatch --array=1-4 record.sh RUN MODEL
#
#SBATCH --job-name=smoe-record
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=8
#SBATCH --requeue
set -eu
cd "$1"
torchrun --standalone --nproc-per-node "$SLURM_GPUS_ON_NODE" -m smoe_cli profile --model "$2" \
    --dataset "prompts-$SLURM_ARRAY_TASK_ID.jsonl" -C "part-$SLURM_ARRAY_TASK_ID"
