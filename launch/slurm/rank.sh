#!/usr/bin/env bash
# One rank of the training, started by srun on every node: rank.sh LOGS ARGUMENTS_OF_TRAIN...
# The first rank that does not end well writes "EXIT_CODE RANK NODE" into LOGS/outcome.
logs=$1
shift

# ended CODE: the first one counts, since the others end because of it.
ended() {
    [ "$1" = 0 ] || (set -o noclobber; echo "$1 $SLURM_PROCID $SLURMD_NODENAME" > "$logs/outcome") 2>/dev/null || true
}
refuse() { echo "error: rank $SLURM_PROCID on node $SLURMD_NODENAME: $1" >&2; exit 2; }

trap 'ended $?' EXIT
trap : TERM USR1  # meant for the training, which saves; this shell waits for it (a child has the signals' own actions)
source launch/slurm/job.sh
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID

[ -s "$HOSTFILE" ] || refuse "the hostfile $HOSTFILE is missing or empty"
found="$SLURM_STEP_NUM_TASKS ranks on $SLURM_STEP_NUM_NODES nodes"
wanted="$WORLD_SIZE ranks on $(wc -l < "$HOSTFILE") nodes"
[ "$found" = "$wanted" ] || refuse "srun started $found, $HOSTFILE says $wanted"

device="no GPU"
if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then  # all of the node's that belong to the job, or the one bound to this rank
    IFS=, read -ra devices <<< "$CUDA_VISIBLE_DEVICES"
    [ ${#devices[@]} -gt 1 ] || LOCAL_RANK=0
    [ ${#devices[@]} = 1 ] || [ ${#devices[@]} -ge "$LOCAL_WORLD_SIZE" ] || refuse \
        "$LOCAL_WORLD_SIZE ranks here, CUDA_VISIBLE_DEVICES is $CUDA_VISIBLE_DEVICES; give as many GPUs as tasks"
    device="GPU ${devices[LOCAL_RANK]} of $CUDA_VISIBLE_DEVICES"
fi
place="node $SLURMD_NODENAME: local rank $LOCAL_RANK, $device"
echo "rank $RANK of $WORLD_SIZE on $place, meeting at $MASTER_ADDR:$MASTER_PORT"

code=0
"${CONTAINER[@]}" "$PYTHON" launch/train.py "$@" || code=$?
case $code in
    75) ended 75; exit 0 ;;  # all ranks stopped together: an exit code would make srun kill those a moment later
    138|143) ended 75; exit 75 ;;  # signalled before training could handle it: nothing is lost, srun ends the others
    *) exit "$code" ;;
esac
