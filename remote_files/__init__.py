"""Download and upload files at http(s) URLs: as streams, only with checked addresses, with no secret in any message.

Proxies of the environment and .netrc are not used: a proxy would resolve the name itself, so that the checked address
would not be the one connected to, and a presigned URL allows no added header.
"""
