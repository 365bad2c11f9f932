#!/bin/sh
# When all shares are counted: add them up, and place experts on EP ranks.
#
#     sbatch --dependency=afterok:JOB place.sh RUN EP
#
#SBATCH --job-name=smoe-place
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=64G
set -eu
cd "$1"
smoe build-tables --merge --jobs "$SLURM_CPUS_PER_TASK" --force -C .
smoe cocluster --ep "$2" --jobs "$SLURM_CPUS_PER_TASK" --force -C .
