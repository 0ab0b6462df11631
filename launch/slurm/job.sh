# Sourced by every batch script: the site, the environment, running a command that may be requeued.

set -euo pipefail
[ -f launch/slurm/job.sh ] || {
    echo "error: $PWD is not the repository: submit from its root, or with submit.sh" >&2; exit 2; }
source "${SITE:-launch/slurm/site.env}"
setup
mkdir -p "$SCRATCH"
export TMPDIR=$SCRATCH TRITON_CACHE_DIR=$SCRATCH/triton-$(id -u)
export TOKENIZERS_PARALLELISM=false TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # srun no longer takes it from the job (SLURM 22.05)
restarts=${SLURM_RESTART_COUNT:-0}

# requeue WHY: this job starts again from the top; does not return.
requeue() {
    if [ "$restarts" -ge "$MAX_RESTARTS" ]; then
        echo "error: $1, and the job has been restarted $restarts times (MAX_RESTARTS of site.env): not requeued" >&2
        exit 75
    fi
    echo "== $1: requeueing, restart $((restarts + 1))"
    scontrol requeue "$SLURM_JOB_ID" || echo "error: $1, but SLURM refuses to requeue job $SLURM_JOB_ID" >&2
    exit 75
}

# run_task COMMAND...: a command that carries on when it is repeated. Before the time limit (SIGUSR1) it is ended and
# the job requeued; a failure ends the job with the command's exit code and names the node.
run_task() {
    local code=0 pid
    echo "== job ${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+ task $SLURM_ARRAY_TASK_ID} on $(hostname -s): $*"
    "${CONTAINER[@]}" "$@" &
    pid=$!
    trap 'kill -TERM $pid 2>/dev/null; wait $pid || true; requeue "the time limit is near"' USR1
    wait "$pid" || code=$?
    trap - USR1
    [ "$code" = 0 ] || echo "error: exit code $code on node ${SLURMD_NODENAME:-$(hostname -s)}: $*" >&2
    return "$code"
}

# free_port FIRST: the first port from FIRST on that nothing on this machine listens on.
free_port() {
    local port=$1
    while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 1)); done
    echo "$port"
}

# job_port: differs between jobs on one machine, below the ports that systems give out themselves.
job_port() { free_port $((15000 + SLURM_JOB_ID % 15000)); }
