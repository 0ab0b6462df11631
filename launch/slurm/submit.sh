#!/usr/bin/env bash
# Submits the whole chain to SLURM, each job waiting for the one before: answers of the target, hidden states, training,
# export, evaluation. Prints the job ids.
#
#   bash launch/slurm/submit.sh RUN.yaml [section.key=value ...] [options]
#
#   --prompts FILE         prompts to train on (default OUT/prompts/train.jsonl, OUT being the run file's `out`)
#   --heldout FILE         prompts to evaluate on (default OUT/prompts/heldout.jsonl)
#   --template-args JSON   arguments of the chat template, as in serving; for answers and evaluation
#   --respond "OPTIONS"    more options of `python -m data_prep respond`, split at blanks; --extract, --evaluate alike
#   --dry-run              print what would be submitted
#
# What the cluster is like stands in launch/slurm/site.env. A job that fails lets none of those after it run; submitted
# again, every stage keeps what is finished.
set -euo pipefail
usage() { sed -n '2,15s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }
refuse() { echo "error: $1; see bash launch/slurm/submit.sh --help" >&2; exit 2; }

run="" prompts="" heldout="" template_args="{}" dry_run=""
overrides=() respond=() extract=() evaluate=()
while [ $# -gt 0 ]; do
    case $1 in
        -h|--help) usage; exit 0 ;;
        --dry-run) dry_run=1; shift; continue ;;
        --*) [ $# -ge 2 ] || refuse "$1 needs a value" ;;
    esac
    case $1 in
        --prompts) prompts=$(realpath "$2"); shift 2 ;;
        --heldout) heldout=$(realpath "$2"); shift 2 ;;
        --template-args) template_args=$2; shift 2 ;;
        --respond) read -ra respond <<< "$2"; shift 2 ;;
        --extract) read -ra extract <<< "$2"; shift 2 ;;
        --evaluate) read -ra evaluate <<< "$2"; shift 2 ;;
        --*) refuse "unknown option $1" ;;
        *=*) overrides+=("$1"); shift ;;
        *) [ -z "$run" ] || refuse "two run files, $run and $1"; run=$(realpath "$1"); shift ;;
    esac
done
[ -n "$run" ] || refuse "no run file given"

[ -z "${SITE:-}" ] || SITE=$(realpath "$SITE")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export SITE=${SITE:-$PWD/launch/slurm/site.env}
source "$SITE"
setup
values=$("${CONTAINER[@]}" "$PYTHON" launch/slurm/run_values.py "$run" "${overrides[@]}")
eval "$values"  # OUT, TARGET, DATASET
prompts=${prompts:-$OUT/prompts/train.jsonl} heldout=${heldout:-$OUT/prompts/heldout.jsonl}
responses=$OUT/responses.jsonl
export LOGS=$OUT/slurm

# job NAME AFTER OPTIONS SCRIPT ARGUMENTS...: submits one; sets id.
job() {
    local name=$1 after=$2 options=$3 log=$LOGS/%x-%j.log
    shift 3
    [[ $options != *--array* ]] || log=$LOGS/%x-%A_%a.log
    local command=(sbatch --parsable --job-name="$name" --chdir="$PWD" --output="$log" --export=ALL $SITE_OPTIONS $options)
    [ -z "$after" ] || command+=(--dependency="afterok:$after" --kill-on-invalid-dep=yes)
    command+=("$@")
    if [ -n "$dry_run" ]; then
        id="<$name>"
        printf '%s' "${command[0]}"
        printf ' %q' "${command[@]:1}"
        echo
    else
        id=$("${command[@]}")
        id=${id%%;*}
        printf '%-18s job %s%s\n' "$name" "$id" "${after:+ after $after}"
    fi
}

if [ -z "$dry_run" ]; then
    for file in "$prompts" "$heldout"; do
        [ -s "$file" ] || refuse "no prompts in $file (python -m data_prep prompts makes them)"
    done
    mkdir -p "$LOGS"
fi
array() { echo "$TASK_OPTIONS --array=0-$(($1 - 1))"; }
folder=launch/slurm

job respond "" "$(array "$RESPOND_TASKS")" $folder/respond.sbatch --num-tasks "$RESPOND_TASKS" --target "$TARGET" \
    --prompts "$prompts" --out "$responses" --template-args "$template_args" "${respond[@]}"
job merge-responses "$id" "$SMALL_OPTIONS" $folder/merge.sbatch "$responses"
job extract "$id" "$(array "$EXTRACT_TASKS")" $folder/extract.sbatch --num-tasks "$EXTRACT_TASKS" --target "$TARGET" \
    --responses "$responses" --out "$DATASET" "${extract[@]}"
job merge-dataset "$id" "$SMALL_OPTIONS" $folder/merge.sbatch "$DATASET"
job train "$id" "$TRAIN_OPTIONS" $folder/train.sbatch "$run" "${overrides[@]}"
job export "$id" "$SMALL_OPTIONS" $folder/export.sbatch "$OUT/checkpoints" "$OUT/drafter"
evaluation=(--num-tasks "$EVALUATE_TASKS" --target "$TARGET" --drafter "$OUT/drafter" --prompts "$heldout" \
    --out "$OUT/report" --template-args "$template_args" --history "$OUT/metrics.jsonl" "${evaluate[@]}")
job evaluate "$id" "$(array "$EVALUATE_TASKS")" $folder/evaluate.sbatch "${evaluation[@]}"
# On a GPU like the tasks: device and precision are settings of an evaluation, and results of other ones are not used.
job collect "$id" "$TASK_OPTIONS" $folder/evaluate.sbatch "${evaluation[@]}"
[ -n "$dry_run" ] || echo "logs: $LOGS"
