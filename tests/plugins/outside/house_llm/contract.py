import json

from cclsearch.testing import ProviderContract


class TestHouse(ProviderContract):
    provider = "house"

    def answer_body(self, text, calls):
        called = [{"tool": name, "arguments": arguments} for name, arguments in calls]
        return json.dumps({"text": text, "calls": called, "tokens": {"in": 10, "out": 5}}).encode()
