"""Files behind http(s) URLs: streamed down and up, from checked addresses alone, with no secret in any message.

Proxies of the environment and .netrc are not used: a proxy would look the name up itself, so that the checked address
would not be the one connected to, and a presigned URL allows no header of ours.
"""
