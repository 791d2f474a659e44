"""Mutual TLS between tiers: real certificates, made here; real links. The served tests' tiers use them over Ray."""

import asyncio
import contextlib
import re
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from starlette.responses import PlainTextResponse

from cascade import SamplingParams
from cascade.client import Client
from cascade.client.rpc import LINK, stub_of
from cascade.errors import ConfigError, Unavailable
from cascade.messages import Failed, Message, Open
from cascade.settings.config import LinkTLS
from cascade.settings.router import ListenConfig, ListenTLS, RequestLimits
from deployments.gateway.http import server as http_server
from deployments.links.downlink import Downlink
from deployments.links.leases import LeasePool
from deployments.links.tls import channel, check, server_credentials
from deployments.links.uplink import CHANNEL_OPTIONS
from deployments.ops.launch import Server, free_port
from tests import small
from tests.in_process import house
from tests.links.certificates import NAME, Authority
from tests.links.net import Net, Rogue, entry, opening, serve_raw
from tests.waiting import LONG_S, until


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.fixture
def theirs(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "theirs")


@pytest.fixture
async def net(tidy: None, ours: Authority) -> AsyncIterator[Net]:
    """Two tiers and a router that speak TLS."""
    net = Net(ours.sign("process"))
    await net.add("tiny", pass_s=0.0002, agreement=0.6)
    await net.add("full", pass_s=0.002)
    yield net
    await net.close()


async def refused(joined: grpc.aio.Channel, net: Net) -> None:
    """Somebody who has even the secret gets no stream over this channel."""
    async with joined:
        call = stub_of(joined, LINK).Connect(metadata=entry(net.nodes["full"]), timeout=LONG_S)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_strangers_get_no_stream_and_harm_nobody(net: Net, ours: Authority, theirs: Authority) -> None:
    """Guards replicas against peers without TLS, without a certificate, and with one that another authority signed."""
    address = net.nodes["full"].server.address
    request = opening(4, 0.8, 300, chain=("tiny",))
    net.router.put([Open("held", request.spec)])  # streams stand and work meanwhile
    await until(lambda: net.nodes["full"].tier.num_sessions == 1)
    await refused(grpc.aio.insecure_channel(address), net)
    root = Path(ours.sign("other").authority).read_bytes()
    options = [("grpc.ssl_target_name_override", NAME)]
    await refused(grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(root), options), net)
    forged = theirs.sign("forged").model_copy(update={"authority": ours.sign("other").authority})
    await refused(channel(address, [], forged), net)
    await net.check(request)
    assert net.failures == []


@pytest.mark.parametrize("impostor", ["without TLS", "of another authority", "for another name"])
async def test_impostors_are_not_told_the_secret(
    tidy: None, ours: Authority, theirs: Authority, impostor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards prompts and secrets against whoever answers at a replica's address; the session fails, so the text goes on."""
    quick = [(name, 100 if name == "grpc.min_reconnect_backoff_ms" else value) for name, value in CHANNEL_OPTIONS]
    monkeypatch.setattr("deployments.links.downlink.CHANNEL_OPTIONS", quick)
    peer = Rogue(lambda session: b"")
    server, address = await serve_raw(peer)
    if impostor != "without TLS":
        tls = theirs.sign("peer") if impostor == "of another authority" else ours.sign("peer", name="somebody")
        port = server.add_secure_port("127.0.0.1:0", server_credentials(tls))
        address = f"127.0.0.1:{port}"
    heard: list[Message] = []
    net = Net()
    downlink = Downlink(LeasePool({"full": lambda *of: net.ticket(address)}), heard.extend, tls=ours.sign("caller"))
    request = opening(5, chain=())
    downlink.put([request])
    await until(lambda: bool(heard))
    assert [(type(message), message.session) for message in heard] == [(Failed, request.session)]
    assert peer.num_calls == 0
    await downlink.close()
    await net.close()
    await server.stop(0)


async def test_renewed_files_are_used(tidy: None, ours: Authority, theirs: Authority) -> None:
    """Guards links against certificates that run out: files that change count for the next connection, without a restart."""
    tls = ours.sign("process")
    net = Net(tls)
    await net.add("full")
    await net.check(opening(6, 0.8, 20, chain=()))
    for old, new in zip(tls.model_dump().values(), theirs.sign("process").model_dump().values(), strict=True):
        with contextlib.suppress(FileNotFoundError):  # the name is no file
            shutil.copyfile(new, old)
    late = ours.sign("late").model_copy(update={"authority": tls.authority})
    await refused(channel(net.nodes["full"].server.address, [], late), net)
    again = Downlink(LeasePool({"full": net.lessor("full")}), net._hear, tls=tls)
    await net.router.close()
    net.router = again
    await net.check(opening(7, 0.8, 20, chain=()))
    await net.close()


async def test_a_renewed_door_is_shown(ours: Authority, theirs: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards HTTP clients against a certificate that runs out: it was read when the router started, and never again."""
    monkeypatch.setattr(http_server, "RENEW_S", 0.01)
    signed = ours.sign("server", name="localhost")
    files = ListenTLS(certificate=signed.certificate, key=signed.key)
    listen = ListenConfig(http_port=free_port(), tls=files)
    server = http_server.HttpServer(PlainTextResponse("well"), listen, RequestLimits())
    await server.open()

    async def welcome(authority: str) -> str:
        context = ssl.create_default_context(cafile=authority)
        async with asyncio.timeout(LONG_S):
            while True:
                with contextlib.suppress(ssl.SSLError, ConnectionError):
                    _, writer = await asyncio.open_connection("localhost", listen.http_port, ssl=context)
                    writer.close()
                    return authority
                await asyncio.sleep(0.01)

    assert await welcome(signed.authority)
    renewed = theirs.sign("server", name="localhost")
    shutil.copyfile(renewed.certificate, files.certificate)  # half of the pair: nobody is sent away meanwhile
    await asyncio.sleep(0.1)
    assert await welcome(signed.authority)
    shutil.copyfile(renewed.key, files.key)
    assert await welcome(renewed.authority)
    await server.close(0)


def test_wrong_files_are_told(ours: Authority, theirs: Authority) -> None:
    """Guards users against tiers that start and never reach each other: one sentence with field, value and fix."""
    right = ours.sign("a")
    wrong = {
        "link_tls.key is '/nowhere'": right.model_copy(update={"key": "/nowhere"}),
        "link_tls.authority is '/'": right.model_copy(update={"authority": "/"}),
        "no certificates in PEM": right.model_copy(update={"authority": __file__}),
        "are not a pair": right.model_copy(update={"key": ours.sign("b").key}),
        "the name 'cascade-link'": ours.sign("c", name="b"),
        "expired": ours.sign("d", days=-1),
        "link_tls.authority must have signed it": right.model_copy(update={"authority": theirs.sign("b").authority}),
    }
    for words, files in wrong.items():
        with pytest.raises(ConfigError, match=f"^[^\n]*{re.escape(words)}[^\n]*$"):
            check(files)


@pytest.mark.parametrize("section", ["link_tls", "router.listen.tls"])
def test_wrong_files_are_told_before_ray_starts(ours: Authority, section: str) -> None:
    """Guards users against servers that take a minute to say that links, or a server, have a key of another certificate."""
    values = small.config().model_dump(mode="json")
    wrong = ours.sign("a").model_dump() | {"key": ours.sign("b").key}
    if section == "link_tls":
        values["link_tls"] = wrong
    else:
        values["router"]["listen"] = {"tls": {name: wrong[name] for name in ("certificate", "key")}}
    with pytest.raises(ConfigError, match=f"^{section}.certificate .* are not a pair"):
        Server.start(values, port=0)


def test_doors_speak_tls(ours: Authority, theirs: Authority) -> None:
    """Guards both servers: who trusts their authority is served, the others and those without TLS are not, nothing is left."""
    tls = ours.sign("server", name="localhost")
    listen = {"grpc_port": free_port(), "http_port": free_port()}
    files = {"certificate": tls.certificate, "key": tls.key}
    params = SamplingParams(max_tokens=16, seed=1)
    with house(listen={**listen, "tls": files}) as built:
        address, url = f"localhost:{listen['grpc_port']}", f"https://localhost:{listen['http_port']}/v1/models"
        with Client(f"grpcs://{address}", authority=tls.authority) as client:
            assert len(client.generate([1, 2, 3], params).token_ids) == 16
        with urllib.request.urlopen(url, timeout=LONG_S, context=ssl.create_default_context(cafile=tls.authority)) as answer:
            assert answer.status == 200
        for target, authority in ((address, None), (f"grpcs://{address}", theirs.sign("a").authority)):
            with Client(target, authority=authority, patience_s=0) as client, pytest.raises(Unavailable):
                client.generate([1, 2, 3], params)
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(url, timeout=LONG_S)
        built.settle()


@pytest.mark.parametrize(
    ("address", "authority", "words"),
    [("a:1", "x.pem", "begin it with grpcs://"), ("grpcs://a:1", "/nowhere", "authority is '/nowhere', which cannot be read")],
)
def test_wrong_trust_is_refused(address: str, authority: str, words: str) -> None:
    """Guards clients against an authority that is not heeded, or not there."""
    with pytest.raises(ConfigError, match=words):
        Client(address, authority=authority)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_documented_certificates_work(tmp_path: Path) -> None:
    """Guards users against commands in docs/howto/secure.md that make certificates which peers refuse."""
    page = (Path(__file__).parents[2] / "docs" / "howto" / "secure.md").read_text(encoding="utf-8")
    commands = page.split("```sh\n")[1].split("```")[0]
    subprocess.run(["sh", "-ec", commands], cwd=tmp_path, check=True, capture_output=True)
    files = {"certificate": "tls.crt", "key": "tls.key", "authority": "ca.crt"}
    check(LinkTLS(**{field: str(tmp_path / file) for field, file in files.items()}))
