"""Files at http(s) URLs: downloads and uploads as streams, only with checked addresses, no secret in any message.

Proxies of the environment and .netrc are not used: a proxy would resolve the name itself, so that the checked address
would not be the one connected to, and a presigned URL allows no added header.
"""
