"""Runs inside the box of an agent: listens on its loopback, forwards to the episode's socket, runs the program.

`PROGRAM` uses the standard library only (Python 3.9 or later) and reads its order from stdin, as JSON.
"""

PROGRAM = r"""
import sys
sys.path[:] = [place for place in sys.path if place]  # the working folder must not shadow a module
import asyncio, json, os, select

async def copy(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except (OSError, RuntimeError):
        writer.close()

async def main():
    order = json.loads(sys.stdin.buffer.read())

    async def forward(reader, writer):
        try:
            up = await asyncio.open_unix_connection(order["socket"])
        except OSError:
            writer.close()
            return
        both = asyncio.gather(copy(reader, up[1]), copy(up[0], writer))
        watch = select.poll()
        watch.register(writer.get_extra_info("socket").fileno(), 0)
        try:
            while not (both.done() or watch.poll(0)):  # a client that is gone cannot take its answer
                await asyncio.wait([both], timeout=0.25)
        finally:
            both.cancel()
            await asyncio.wait([both])
            up[1].close()
            writer.close()

    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    root = "http://127.0.0.1:%d" % server.sockets[0].getsockname()[1]
    env = {**os.environ, **{name: value.replace("{root}", root) for name, value in order["env"].items()}}
    words = [word.replace(order["env"]["OPENAI_BASE_URL"], env["OPENAI_BASE_URL"]) for word in order["command"]]
    if words[0] in ("python", "python3"):
        words[0] = sys.executable or "python3"
    try:
        process = await asyncio.create_subprocess_exec(*words, stdin=asyncio.subprocess.PIPE, env=env)
    except OSError as error:
        print("cannot start %s: %s" % (words[0], error.strerror), file=sys.stderr)
        return 127
    try:
        await process.communicate(json.dumps(order["task"]).encode())
    except OSError:
        pass  # the program does not have to read it
    code = await process.wait()
    return code if code >= 0 else 128 - code

code = asyncio.run(main())
sys.stdout.flush()
os._exit(code)
"""
