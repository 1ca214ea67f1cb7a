"""Inter-token latency through vLLM: the specialised decode beside the standard path, compiled and eager."""
