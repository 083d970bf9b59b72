#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=04:00:00
export HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Exclusive: by default a task gets one CPU. In single quotes: each node puts in its own number.
srun bash -c 'accelerate launch --config_file fsdp2.yaml \
    --num_machines "$SLURM_NNODES" --machine_rank "$SLURM_NODEID" \
    --num_processes $((SLURM_NNODES * SLURM_GPUS_ON_NODE)) \
    --main_process_ip "$HEAD" --main_process_port 29500 train.py'
