"""The client of SGLang's protocol, shared by all who generate or publish weights."""
