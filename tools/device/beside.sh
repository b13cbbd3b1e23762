#!/bin/bash
# Several device programs beside each other: each on its card, in a folder of its own; tables at the end, logs in one archive.
#   bash tools/device/beside.sh LIMIT_S "0 moe --only without with" "1 kills" "all two_gpus --no-kill"
# A start of a run takes two minutes, three when several start at once. What is timed should run alone.
set -uo pipefail
out=${OUT:-runs/device} work=${WORK:-$(mktemp -d)} began=$SECONDS limit_s=$1
shift
mkdir -p "$out"

go() {
    local card=$1 program=$2
    shift 2
    [ "$card" = all ] || export CUDA_VISIBLE_DEVICES=$card
    mkdir -p "$work/$program"
    timeout -s INT $((limit_s + 15)) "${PYTHON:-python3}" -m "tools.device.$program" --out "$out" --work "$work/$program" --limit-s "$limit_s" "$@" \
        >"$work/$program.log" 2>&1
    echo "$program left with $? after $((SECONDS - began)) s"
}

for words in "$@"; do
    # shellcheck disable=SC2086 - the words of one program
    go $words &
done
wait
for words in "$@"; do
    read -r _ program _ <<<"$words"
    echo "##### $program"
    sed -n '/^== /,$p' "$work/$program.log" | cut -c1-500 | grep . || tail -n 15 "$work/$program.log"
done
cd "$out" && ls ./*-logs.tgz >/dev/null 2>&1 && tar czf logs.tgz ./*-logs.tgz && rm -f ./*-logs.tgz
exit 0
