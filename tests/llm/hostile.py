"""Over 300 programs that try to escape from the sandbox or to crash it, by all known methods."""

from __future__ import annotations

CALL = "def generate_config(workload, environment):\n"


def inside(*lines: str) -> str:
    """A program whose `generate_config` contains these lines."""
    return CALL + "".join(f"    {line}\n" for line in lines)


def gets(expression: str, *before: str) -> str:
    """A program that returns the value of an expression as text: a result is an escape."""
    return inside(*before, f"return {{'stolen': str({expression})}}")


_FILES = [
    gets("open('CANARY_PATH').read()"),
    gets("open('/etc/passwd').read()"),
    gets("open('/proc/self/environ').read()"),
    gets("open('/proc/self/maps').read()"),
    gets("open('/proc/1/cmdline', 'rb').read()"),
    gets("open('../../../../etc/passwd').read()"),
    gets("open('/etc/passwd', 'rb').read()"),
    gets("open('CANARY_PATH', 'w').write('x')"),
    gets("open('CANARY_PATH', 'a').write('x')"),
    gets("open('CANARY_PATH', 'r+').write('x')"),
    gets("open('new.txt', 'x').write('x')"),
    gets("open('/tmp/escape', 'w').write('x')"),
    gets("open(0).read()"),
    gets("open(1, 'w').write('x')"),
    gets("open(3).read()"),
    gets("list(open('/etc/hostname'))"),
    gets("Path('CANARY_PATH').read_text()", "from pathlib import Path"),
    gets("Path('/').iterdir()", "from pathlib import Path", "list(Path('/').iterdir())"),
    gets("Path('/etc/passwd').read_bytes()", "from pathlib import Path"),
    gets("Path('CANARY_PATH').unlink()", "from pathlib import Path"),
    gets("Path('CANARY_PATH').write_text('x')", "from pathlib import Path"),
    gets("Path('/tmp/escape').mkdir()", "from pathlib import Path"),
    gets("next(Path('/etc').glob('*')).read_text()", "from pathlib import Path"),
    gets("Path.home().read_text()", "from pathlib import Path"),
    gets("Path('CANARY_PATH').rename('/tmp/moved')", "from pathlib import Path"),
    gets("Path('/tmp/link').symlink_to('/etc')", "from pathlib import Path"),
    gets("Path('/etc/passwd').stat()", "from pathlib import Path"),
]

_OS = [
    gets(f"os.{call}", "import os")
    for call in (
        "environ['CCL_CANARY_API_KEY']",
        "environ",
        "environ.copy()",
        "getenv('CCL_CANARY_API_KEY') + ''",
        "system('id')",
        "popen('id').read()",
        "listdir('/')",
        "scandir('/')",
        "walk('/').__next__()",
        "remove('CANARY_PATH')",
        "unlink('CANARY_PATH')",
        "rename('CANARY_PATH', '/tmp/x')",
        "mkdir('/tmp/escape')",
        "fork()",
        "kill(1, 9)",
        "execv('/bin/sh', ['sh'])",
        "spawnl(0, '/bin/sh')",
        "open('/etc/passwd', 0)",
        "read(0, 10)",
        "write(1, b'x')",
        "dup2(1, 2)",
        "_exit(0)",
        "abort()",
        "setuid(0)",
        "getuid()",
        "uname()",
        "cpu_count()",
        "stat('/etc/passwd')",
        "path.exists('/etc/passwd') and open('/etc/passwd').read()",
        "urandom(10**9)",
        "symlink('/etc', '/tmp/x')",
        "chmod('CANARY_PATH', 0)",
        "putenv('A', 'b')",
        "sched_yield()",
        "posix_spawn('/bin/sh', [], {})",
        "memfd_create('x')",
        "pipe()",
        "ptrace()",
        "chroot('/tmp')",
        "__loader__",
        "sys.modules",
    )
]

_MODULES = [
    gets(f"{name}.__doc__", f"import {name}")
    for name in """
        socket ssl http.client urllib.request subprocess multiprocessing threading ctypes mmap signal resource shutil
        tempfile pickle marshal sqlite3 importlib runpy code inspect gc builtins platform pwd pty fcntl faulthandler
        atexit cclsearch.core.secrets.redact pydantic_monty anthropic numpy webbrowser logging smtplib
    """.split()  # noqa: SIM905
]

_INTROSPECTION = [
    gets(expression)
    for expression in (
        "().__class__.__bases__[0].__subclasses__()",
        "''.__class__.__mro__[1].__subclasses__()",
        "[].__class__.__base__",
        "(lambda: 0).__globals__",
        "(lambda: 0).__code__",
        "generate_config.__globals__",
        "generate_config.__code__.co_consts",
        "generate_config.__builtins__",
        "generate_config.__closure__",
        "type(1).__subclasses__(type)",
        "type.__subclasses__(object)",
        "object.__subclasses__()",
        "__builtins__",
        "__builtins__['open']",
        "__import__('os').environ",
        "__loader__.load_module('os')",
        "__spec__.loader.load_module('os')",
        "globals()",
        "locals()['__builtins__']",
        "vars()",
        "dir(__builtins__)",
        "getattr((), '__cl' + 'ass__').__bases__",
        "getattr(print, '__self__')",
        "print.__self__",
        "len.__self__.__import__('os')",
        "breakpoint()",
        "input()",
        "compile('1', 'x', 'eval')",
        "help()",
        "memoryview(b'x').obj.__class__.__bases__",
        "'{0.__class__}'.format(1)",
        "'{0.__class__.__init__.__globals__}'.format(generate_config)",
        "f'{generate_config.__globals__}'",
        "'%(a)s' % {'b': 1}",
        "exit()",
        "quit()",
        "copyright._Printer__filenames",
        "license()",
        "(x for x in [1]).gi_frame.f_back",
        "(1).real.__class__.__init__.__self__",
        "super().__init__.__self__",
        "NotImplemented.__reduce__().__class__",
        "Exception().__traceback__.tb_frame",
        "Exception().with_traceback(None).__context__.args",
        "eval('__import__(\"os\")')",
        "eval('open(\"/etc/passwd\").read()')",
        "exec('import os; os.environ[\"HOME\"]')",
        "eval(eval('\"().__class__.__bases__\"'))",
        "sys._getframe()",
        "sys.modules['os']",
    )
]

_FRAMES = [
    gets("sys._getframe(0).f_globals", "import sys"),
    gets("sys.modules", "import sys"),
    gets("sys.meta_path", "import sys"),
    gets("sys.stdin.read()", "import sys"),
    gets("sys.stdout.buffer", "import sys"),
    gets("sys.exit(0)", "import sys"),
    gets("sys.settrace(print)", "import sys"),
    gets("sys.setrecursionlimit(10**9)", "import sys"),
    gets("json.codecs", "import json"),
    gets("json.decoder.__globals__", "import json"),
    gets("json.load(open('/etc/passwd'))", "import json"),
    gets("re.sys.modules", "import re"),
    gets("collections.abc.sys", "import collections"),
    gets("collections._sys.modules", "import collections"),
    gets("functools.partial.__class__.__bases__", "import functools"),
    gets("random._os.system('id')", "import random"),
    gets("math.__loader__", "import math"),
    gets("typing.sys.modules", "import typing"),
    gets("dataclasses.sys.modules", "import dataclasses"),
    gets("datetime.sys", "import datetime"),
    gets("time.sleep.__self__.__loader__", "import time"),
    gets(
        "asyncio.create_subprocess_shell('id')", "import asyncio", "asyncio.run(asyncio.create_subprocess_shell('id'))"
    ),
    gets("asyncio.open_connection('127.0.0.1', 80)", "import asyncio", "asyncio.run(asyncio.open_connection('x', 1))"),
    gets(
        "e.__traceback__.tb_frame.f_back",
        "e = None",
        "try:",
        "    1 / 0",
        "except Exception as error:",
        "    e = error",
    ),
]

_MEMORY = [
    inside(line, "return {'tp': 1, 'x': len(str(x))}")
    for line in (
        "x = [0] * 10**10",
        "x = 'a' * 10**10",
        "x = b'a' * 10**9",
        "x = list(range(10**9))",
        "x = {i: i for i in range(10**8)}",
        "x = set(range(10**8))",
        "x = 2 ** (10**10)",
        "x = 1 << 10**10",
        "x = 9 ** 9 ** 9",
        "x = bytearray(10**10)",
        "x = ' '.join(['a' * 10**6] * 10**5)",
        "x = 'a'.zfill(10**10)",
        "x = 'a'.center(10**10)",
        "x = 'a'.ljust(10**10)",
        "x = f'{1:>10000000000}'",
        "x = '%10000000000d' % 1",
        "x = ('a' * 10**4).replace('a', 'b' * 10**6)",
        "x = ['a' * i for i in range(10**6)]",
        "x = [[]] * 10**9",
        "x = str(10 ** 10**7)",
        "x = 'a,' * 10**8",
        "x = tuple(range(10**9))",
        "x = sorted(range(10**9))",
        "x = '\\n'.join('x' * 1000 for _ in range(10**7))",
        "x = '\\t'.expandtabs(10**10)",
        "x = int('9' * 10**7)",
    )
] + [
    inside("x = 'ab'", "while True:", "    x = x + x"),
    inside("x = []", "while True:", "    x.append('a' * 10**6)"),
    inside("x = [1]", "while True:", "    x = x + x"),
    inside("x = [1]", "for i in x:", "    x.append(i)"),
    inside("d = {}", "n = 0", "while True:", "    n += 1", "    d[n] = [n] * 1000"),
    inside("x = 3", "while True:", "    x = x * x"),
    inside("from copy import deepcopy", "x = [1] * 10**5", "while True:", "    x = [deepcopy(x), deepcopy(x)]"),
    inside("import itertools", "return {'x': len(list(itertools.product(range(10**4), repeat=4)))}"),
    inside("import itertools", "return {'x': len(list(itertools.permutations(range(30))))}"),
    inside("import json", "x = json.dumps([0] * 10**9)"),
    inside("import re", "return {'x': re.sub('a', 'b' * 10**6, 'a' * 10**6)}"),
]

_RECURSION = [
    CALL + "    return generate_config(workload, environment)",
    inside("f = lambda n: f(n + 1)", "return f(0)"),
    "class A:\n    def __getattr__(self, name):\n        return getattr(self, name + 'x')\n" + inside("return A().b"),
    "class B:\n    def __repr__(self):\n        return repr(self)\n" + inside("return {'x': repr(B())}"),
    "class C:\n    def __eq__(self, other):\n        return self == other\n" + inside("return {'x': C() == C()}"),
    "class D:\n    def __str__(self):\n        return str(self)\n" + inside("return {'x': str(D())}"),
    "def a(n):\n    return b(n)\ndef b(n):\n    return a(n)\n" + inside("return a(1)"),
    inside("x = []", "for i in range(10**6):", "    x = [x]", "return {'x': repr(x)[:1] + str(x == x) * 10**6}"),
    inside("x = {}", "for i in range(10**5):", "    x = {'a': x}", "return x"),
    inside("x = []", "x.append(x)", "return {'x': x}"),
    inside("x = {}", "x['x'] = x", "return x"),
    inside("f = max", "for i in range(10**5):", "    f = (lambda g: lambda *a: g(*a))(f)", "return {'x': f(1, 2)}"),
    inside("return eval('(' * 10**5 + '1' + ')' * 10**5)"),
    inside("return eval('-' * 10**6 + '1')"),
    inside("return eval('[' * 10**5)"),
]

_RETURNS = [
    inside(f"return {value}")
    for value in (
        "{'x': 'a' * 10**7}",
        "{str(i): i for i in range(10**5)}",
        "{'x': [1] * 10**6}",
        "{'x': {'y': {'z': 1}}}",
        "{'x': None}",
        "{'x': float('inf')}",
        "{'x': -float('inf')}",
        "{'x': float('nan')}",
        "{'x': 10 ** 10000}",
        "{'x': print}",
        "{'x': generate_config}",
        "{'x': b'bytes'}",
        "{'x': {1, 2}}",
        "{'x': 1j}",
        "{(1, 2): 3}",
        "{'x': object()}",
        "[('tp', 1)]",
        "'tp=1'",
        "None",
        "1",
        "lambda: {'tp': 1}",
        "generate_config",
        "range(10**12)",
        "workload['config_space']",
        "{'a' * 10**6: 1}",
    )
]

_FLOODS = [
    inside("for i in range(10**9):", "    print('x' * 1000)"),
    inside("print('x' * 10**8)", "return {'x': 1}"),
    inside("while True:", "    print()"),
    inside("import sys", "while True:", "    print('x' * 10**5, file=sys.stderr)"),
    inside("raise ValueError('x' * 10**7)"),
    inside("assert False, 'x' * 10**7"),
    inside("raise SystemExit(0)"),
    inside("raise KeyboardInterrupt()"),
    inside("raise BaseException('out')"),
    inside("raise RecursionError('x')"),
    inside("raise MemoryError()"),
    inside("raise StopIteration()"),
]

_TRICKS = [
    "import json\njson.dumps = lambda x: 'x' * 10**7\n" + inside("return {'x': {}}"),
    "generate_config = 3",
    "generate_config = print",
    "class generate_config:\n    pass",
    "raise SystemExit",
    "import os\nos.system('id')",
    "def generate_config(w, e):\n    return {'tp': 1\n",
    "def generate_config(w, e): return {'tp': 1}\nwhile True: pass",
    "await generate_config",
    "return 1",
    "\x01\x02\x03",
    "from __main__ import run\n" + inside("return run"),
    "from . import sandbox_child\n" + inside("return 1"),
    "from .. import redact\n" + inside("return 1"),
    "from os import *\n" + inside("return system('id')"),
    "import os as json\n" + inside("return json.listdir('/')"),
    inside("with open('/etc/passwd') as f:", "    return {'x': f.read()}"),
    inside("import socket", "s = socket.socket()", "s.connect(('127.0.0.1', 22))"),
    inside("import urllib.request", "return {'x': urllib.request.urlopen('http://127.0.0.1/').read()}"),
    inside("from subprocess import check_output", "return {'x': check_output('id')}"),
]

SLOW = [
    inside("while True:", "    pass"),
    inside(
        "while True:",
        "    try:",
        "        while True:",
        "            pass",
        "    except BaseException:",
        "        pass",
    ),
    inside("for i in range(10**18):", "    pass"),
    inside("x = 0", "while x >= 0:", "    x += 1"),
    inside("return {'x': sum(range(10**12))}"),
    inside("import itertools", "for x in itertools.count():", "    pass"),
    inside("import math", "return {'x': math.factorial(10**8) % 7}"),
]
"""Programs that never end by themselves."""

HOSTILE: list[str] = [
    *_FILES,
    *_OS,
    *_MODULES,
    *_INTROSPECTION,
    *_FRAMES,
    *_MEMORY,
    *_RECURSION,
    *_RETURNS,
    *_FLOODS,
    *_TRICKS,
]
"""Everything but `SLOW`."""
