"""Why a request took as long as it did: what the ingress saw, stitched to what the workers say."""
