"""What SGLang 0.5.23 answered, as recorded from the real program: status codes, keys and texts."""

META_KEYS = {
    "id", "finish_reason", "prompt_tokens", "weight_version", "num_retractions", "storage_prefetch_wait",
    "storage_staging_wait", "forward_entry_time", "prefill_finished_time", "queue_time", "reasoning_tokens",
    "completion_tokens", "cached_tokens", "weight_versions", "cached_tokens_details", "dp_rank", "e2e_latency",
    "request_received_ts", "first_token_latency", "api_server_dispatch_finish_ts", "request_finished_ts",
    "decode_throughput", "response_sent_to_client_ts",
}  # fmt: skip
TIMING_KEYS = {  # only with --enable-metrics
    "storage_prefetch_wait", "storage_staging_wait", "forward_entry_time", "prefill_finished_time", "queue_time",
    "request_received_ts", "first_token_latency", "api_server_dispatch_finish_ts", "request_finished_ts",
    "decode_throughput",
}  # fmt: skip
LOGPROB_KEYS = {"input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length"}
TOP_KEYS = {"input_top_logprobs", "output_top_logprobs"}
TOKEN_IDS_KEYS = {"input_token_ids_logprobs", "output_token_ids_logprobs"}
ONLY_AT_THE_END = {
    "weight_versions", "e2e_latency", "request_received_ts", "first_token_latency", "api_server_dispatch_finish_ts",
    "request_finished_ts", "decode_throughput", "response_sent_to_client_ts",
}  # fmt: skip

MODEL_INFO_KEYS = {
    "model_path", "served_model_name", "tokenizer_path", "is_generation", "preferred_sampling_params", "weight_version",
    "load_format", "reasoning_parser", "tool_call_parser", "disaggregation_mode", "has_image_understanding",
    "has_audio_understanding", "model_type", "architectures",
}  # fmt: skip
LOADS_KEYS = {"timestamp", "version", "accelerator", "num_accelerators", "loads"}
LOAD_KEYS = {
    "timestamp", "dp_rank", "num_running_reqs", "num_waiting_reqs", "num_waiting_uncached_tokens", "num_used_tokens",
    "num_total_tokens", "num_active_tokens", "max_total_num_tokens", "max_running_requests", "token_usage",
    "gen_throughput", "cache_hit_rate", "utilization", "memory", "queues",
}  # fmt: skip
QUEUE_KEYS = {"waiting", "grammar", "paused", "retracted", "prealloc_ready"}
CHAT_KEYS = {"id", "object", "created", "model", "choices", "usage", "metadata"}
CHOICE_KEYS = {"index", "message", "logprobs", "finish_reason", "matched_stop"}
USAGE_KEYS = {
    "prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details", "reasoning_tokens",
    "completion_tokens_details",
}  # fmt: skip

PAUSED = {"message": "Generation paused successfully.", "status": "ok"}
CONTINUED = {"message": "Generation continued successfully.", "status": "ok"}
FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, the "
    "operation will not be performed.)\n"
)
NOT_FLUSHED = "Flush cache failed.\n"
TOO_LONG = (
    "Requested token count exceeds the model's maximum context length of {limit} tokens. You requested a total of "
    "{total} tokens: {prompt} tokens from the input messages and {new} tokens for the completion. Please reduce the "
    "number of tokens in the input messages or the completion to fit within the limit."
)
PROMPT_TOO_LONG = "The input ({prompt} tokens) is longer than the model's context length ({limit} tokens)."
BAD_TEMPERATURE = "temperature must be a non-negative finite number, got -1"
NO_INPUT = "Either text, input_ids or input_embeds should be provided."
UPDATED = "Succeeded to update model weights. Weight version updated to {version}."
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
