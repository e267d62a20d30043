"""SGLang as the engine of an inference replica: the real program, in a process of its own, reached by HTTP only."""
