#!/usr/bin/env bash
#SBATCH --job-name=agentrl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
# sbatch examples/cluster/slurm.sh configs/qwen3-30b-a3b-16gpu.yaml --set model.path=/models/Qwen3-30B-A3B
# A requeued job resumes from its newest checkpoint: the command is the same.
set -euo pipefail
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # which srun does not take over from the job since Slurm 22.05
# With this file, `ray start` asks for the token in it, which is not sent to an address unless this is set.
if [ -f ~/.ray/auth_token ]; then export RAY_AUTH_MODE=token; fi
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# The first address that other nodes can reach: --ip-address may answer with one of the loopback device.
head=$(srun --nodes=1 --ntasks=1 -w "${nodes[0]}" hostname --all-ip-addresses | awk '{print $1}')
port=6379
srun --nodes=1 --ntasks=1 -w "${nodes[0]}" ray start --head --node-ip-address="$head" --port=$port --block &
sleep 20
for node in "${nodes[@]:1}"; do
  srun --nodes=1 --ntasks=1 -w "$node" ray start --address="$head:$port" --block &
done
sleep 20
srun --overlap --nodes=1 --ntasks=1 -w "${nodes[0]}" agentrl train "$@" --set ray="$head:$port"
