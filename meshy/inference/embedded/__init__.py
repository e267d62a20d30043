"""An inference server for machines without SGLang, speaking SGLang's HTTP protocol.

Read it in this order: `request` (what one generation is), `scheduler` (who runs), `batch` (the flat row of tokens of
one step), `attention` and `cache` (where its keys live), `weights` and `runner` (the model), `sampler`, `engine` (the
loop and its commands), `session` and `groups` (weights that come tensor by tensor), `protocol` and `chat` (JSON in,
JSON out), `http`, `server`, `weight_routes` and `information` (what answers on which path), `launch` (the parts put
together).
"""
