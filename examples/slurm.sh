#!/bin/bash
# burst train under Slurm: one torchrun per node. Cut off or requeued, the job resumes from its newest checkpoint.
#
#     sbatch --nodes 4 --gpus-per-node 8 examples/slurm.sh --config run.toml --out /shared/run
#     sbatch examples/slurm.sh --device cpu --steps 20 --save-every 4 --out runs/slurm   # two ranks on CPUs
#
# Arguments are those of burst train. All nodes must see --out.
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=burst-%j.log

set -u
ranks=${SLURM_GPUS_ON_NODE:-$SLURM_CPUS_ON_NODE}  # per node: one for each GPU, or each core
deadline=28500  # seconds: saves 5 minutes before --time
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun --kill-on-bad-exit=1 torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "$ranks" \
    --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" --rdzv-backend c10d --rdzv-endpoint "$head:29400" \
    -m burst_attention.cli train --resume auto --deadline "$deadline" "$@"
status=$?

# Requeue a job that failed or ran into its deadline, but not for ever.
if [ "$status" -ne 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "${MAX_RESTARTS:-3}" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
