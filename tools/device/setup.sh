#!/bin/bash
# Sourced on a GPU machine without network: unpack the kit and the wheels that came with this call, and set what the programs need.
for folder in .device/[0-9]*; do
  [ -d "$folder" ] || continue
  if [ -f "$folder/install.sh" ]; then source "$folder/install.sh" "$folder"; else mkdir -p "$HOME/kit" && cp -u "$folder"/* "$HOME/kit/"; fi
done
mkdir -p "$HOME/site_molt"
for wheel in "$HOME"/kit/*.whl; do
  case "$wheel" in *transformer_engine*) continue ;; esac
  [ -f "$wheel" ] && [ ! -f "$wheel.done" ] && python3 -m zipfile -e "$wheel" "$HOME/site_molt" && touch "$wheel.done"
done
export PYTHONPATH="$PWD:$HOME/site_molt:$HOME/site:$PYTHONPATH"
export RAY_memory_monitor_refresh_ms=0  # the machine shows less memory than it has, and grows
export VLLM_ALLOW_INSECURE_SERIALIZATION=1 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 OMP_NUM_THREADS=4 TOKENIZERS_PARALLELISM=false NO_COLOR=1
mount -o remount,size=32G /dev/shm 2>/dev/null || true
