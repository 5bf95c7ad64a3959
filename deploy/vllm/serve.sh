#!/bin/sh
# vLLM as Anneal runs it, without Anneal: for looking at one engine by hand. In service, `python -m gpu_workers.engine.launcher`
# starts the same line and ends every process of it; a test compares the two.
#   sh deploy/vllm/serve.sh /models/qwen3-8b b-qwen3-8b [further vLLM options]
set -eu
model=$1 served_name=$2
shift 2

# vLLM makes its socket readable by everybody: the folder is the guard.
folder=${SOCKET_DIR:-/run/anneal-engine}
mkdir -p "$folder"
chmod 0700 "$folder"

export VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_PLUGINS= VLLM_COMPUTE_NANS_IN_LOGITS=1 VLLM_MAX_N_SEQUENCES=128
export VLLM_MEDIA_URL_ALLOW_REDIRECTS=0 VLLM_HTTP_TIMEOUT_KEEP_ALIVE=75 VLLM_NO_USAGE_STATS=1
export VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB=16 VLLM_MAX_IMAGE_PIXELS=16777216
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 DO_NOT_TRACK=1

# Of other architectures than Llama's: the column "LoRA on" of docs/models.md, for example LORA_MODULES="q_proj k_proj v_proj o_proj".
# With a tool parser, whose grammars are xgrammar's: GRAMMARS='{"backend": "auto"}'.
grammars='{"backend": "guidance", "disable_any_whitespace": true}'
exec "${PYTHON:-python}" -m vllm.entrypoints.openai.api_server \
    --model "$model" --served-model-name "$served_name" --uds "$folder/vllm.sock" --api-server-count 1 \
    --allowed-media-domains ${MEDIA_HOSTS:-nowhere.invalid} \
    --enable-lora --max-loras "${MAX_LORAS:-8}" --max-cpu-loras "${MAX_CPU_LORAS:-64}" \
    --max-lora-rank "${MAX_LORA_RANK:-64}" \
    --lora-target-modules ${LORA_MODULES:-q_proj k_proj v_proj o_proj gate_proj up_proj down_proj} \
    --generation-config vllm --max-logprobs 20 --max-num-queued-reqs "${MAX_QUEUED_REQUESTS:-512}" \
    --structured-outputs-config "${GRAMMARS:-$grammars}" \
    --enable-force-include-usage --enable-prompt-tokens-details --enable-request-id-headers \
    --enable-server-load-tracking --shutdown-timeout "${DRAIN_SECONDS:-30}" --fingerprint-mode none \
    --disable-fastapi-docs --disable-uvicorn-access-log "$@"
