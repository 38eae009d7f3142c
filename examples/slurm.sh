#!/bin/bash
# burst train under Slurm, one torchrun on each node. A job that fails or runs out of time is requeued and resumes.
#
#     sbatch --nodes 4 --gpus-per-node 8 --exclusive examples/slurm.sh --config run.toml --out /shared/run
#     sbatch --cpus-per-task 2 examples/slurm.sh --device cpu --steps 20 --save-every 4 --out runs/slurm
#
# The arguments after the script are those of burst train. All nodes must see --out.
#SBATCH --ntasks-per-node=1
#SBATCH --time=08:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --output=burst-%j.log
#SBATCH --open-mode=append

set -u
max_restarts=5
restarts=${SLURM_RESTART_COUNT:-0}
ranks=${SLURM_GPUS_ON_NODE:-$SLURM_CPUS_ON_NODE} # of each node: its GPUs, or its cores
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
end=$(date -d "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %e)" +%s)
deadline=$((end - $(date +%s) - 300)) # seconds: saves 5 minutes before --time

# srun gives a task one core unless it asks for more. Jobs that share a host need ports of their own.
srun --kill-on-bad-exit=1 --cpus-per-task "$SLURM_CPUS_ON_NODE" \
    torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "$ranks" --rdzv-id "$SLURM_JOB_ID-$restarts" \
    --rdzv-backend c10d --rdzv-endpoint "$head:$((20000 + SLURM_JOB_ID % 10000))" \
    -m burst_attention.cli train --resume auto --deadline "$deadline" "$@"
status=$?

if [ "$status" -ne 0 ] && [ "$restarts" -lt "$max_restarts" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
