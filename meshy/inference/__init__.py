"""The inference role: a service that answers generation requests over SGLang's HTTP protocol."""
