"""One smoke."""
from .fakes import turn_body
def test_smoke(stack):
    """A turn."""
    async def scenario(client):
        r = await client.post("/v1/sessions/s/turns", json=turn_body(1))
        print(r.status_code, r.text)
        r = await client.post("/v1/sessions/s/turns", json=turn_body(2, stream=True))
        print(r.status_code, r.text)
        r = await client.get("/v1/sessions")
        print(r.text, [o for o,_ in stack.engine.ops], stack.p.calls[-1])
    stack.run(scenario)
