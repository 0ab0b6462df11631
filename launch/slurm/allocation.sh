# Sourced by train.sbatch: who takes part, from what SLURM allocated. Never falls back to localhost.
# Exports MASTER_ADDR, MASTER_PORT, WORLD_SIZE, LOCAL_WORLD_SIZE and HOSTFILE (DeepSpeed's format, a line per node),
# which is written into the folder $1.

allocation() {
    local folder=$1 names node slots
    names=$(scontrol show hostnames "${SLURM_JOB_NODELIST:?is not set: start this with sbatch}") && [ -n "$names" ] || {
        echo "error: scontrol does not name the nodes of $SLURM_JOB_NODELIST" >&2; return 2; }
    slots=${SLURM_TASKS_PER_NODE:?is not set: give --ntasks-per-node}
    [[ $slots =~ ^([0-9]+)(\(x[0-9]+\))?$ ]] || {
        echo "error: SLURM_TASKS_PER_NODE is $slots: every node has to have as many ranks; give --ntasks-per-node" >&2
        return 2; }
    slots=${BASH_REMATCH[1]}
    export HOSTFILE=$folder/hostfile LOCAL_WORLD_SIZE=$slots
    for node in $names; do echo "$node slots=$slots"; done > "$HOSTFILE"
    WORLD_SIZE=$(($(wc -l < "$HOSTFILE") * slots))
    # The address under which SLURM itself reaches the first node, where this script runs.
    MASTER_ADDR=$(scontrol show node -o "${names%%$'\n'*}" | grep -o ' NodeAddr=[^ ]*') || {
        echo "error: scontrol gives no address of node ${names%%$'\n'*}" >&2; return 2; }
    MASTER_ADDR=${MASTER_ADDR#*=}
    MASTER_PORT=$(job_port)
    export WORLD_SIZE MASTER_ADDR MASTER_PORT
}
