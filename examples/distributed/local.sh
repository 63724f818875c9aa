#!/usr/bin/env bash
# Two processes of two virtual devices each on this machine: bash examples/distributed/local.sh [folder]
set -uo pipefail
here=$(dirname "$0")
run=${1:-$(mktemp -d)/run}
export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=2 NUM_PROCESSES=2
COORDINATOR=localhost:$("${PYTHON:-python}" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
export COORDINATOR
processes=()
for number in 0 1; do
    PROCESS_ID=$number "${PYTHON:-python}" "$here/train.py" --run "$run" &
    processes+=($!)
done
failed=0
for process in "${processes[@]}"; do wait "$process" || failed=1; done
if [ "$failed" -ne 0 ]; then
    echo "a process ended early; start again with: bash $0 $run" >&2
fi
exit "$failed"
