"""Secrets in text are masked by their shape or by the name before them; ordinary text is unchanged."""

from __future__ import annotations

import base64
import json
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cclsearch.core.secrets.redact import MASK, redact

HEX = "0123456789abcdef0123456789abcdef01234567"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (f"WANDB_API_KEY={HEX}", HEX),
        (f"export WANDB_API_KEY='{HEX}' and on", HEX),
        (f'{{"wandb_api_key": "{HEX}"}}', HEX),
        (f'"{{\\"api_key\\": \\"{HEX}\\"}}"', HEX),
        (f"HF_TOKEN: {HEX}", HEX),
        ("login with password=hunter2 failed", "hunter2"),
        ("password=correcthorse&user=x", "correcthorse"),
        ('"password": "correcthorse"', "correcthorse"),
        ("password: h0rse!battery", "h0rse!battery"),
        ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"),
        ("http://h/v1?api_key=abcdefgh#m", "abcdefgh"),
        ("token=abcd1234efgh", "abcd1234efgh"),
        ("Authorization: Basic dXNlcjpwYXNzd29yZA==", "dXNlcjpwYXNzd29yZA=="),
        ("authorization: Bearer abcdefgh+ijklmnop/qrst==", "abcdefgh+ijklmnop/qrst=="),
        ("Bearer abc.def-ghi+jkl/mno~p", "abc.def-ghi+jkl/mno~p"),
        (f"cookie {JWT} sent", JWT),
        ("github_pat_11ABCDEFG0123456789_abcdefghijklmnop", "11ABCDEFG0123456789"),
        ("postgres://user:sesame@host/db", "sesame"),
    ],
)
def test_a_secret_in_text_is_masked(text, secret):
    masked = redact(text, {})
    assert secret not in masked
    assert MASK in masked
    assert redact(masked, {}) == masked


@pytest.mark.parametrize(
    "text",
    [
        "tokens per second: 5",
        "max_tokens=12000",
        "tokens_per_s: 123456.7",
        "time_per_token=0.00012345s",
        "num_tokens: 65536 tokens",
        "unexpected token: identifier",
        "eos_token=128001, pad_token: <pad>",
        "tokenizer=LlamaTokenizerFast",
        "the password: must be given",
        "OPENAI_API_KEY is not set; set it",
        "api_key=None token=null",
        "author: Somebody Else",
        "authentication: failed",
        "key: value12345",
        "hidden=4096 heads: 32 layers=80",
        "KeyError: 'step_time'",
        "2024-05-06 12:34:56.789 [rank0]: loss=2.345678 grad_norm: 1.23456789",
        "sort(key=lambda_1234567)",
        "token[5] = vocabulary99",
    ],
)
def test_ordinary_text_is_unchanged(text):
    assert redact(text, {}) == text


def test_a_long_text_is_redacted_in_linear_time():
    text = "a-b." * 50_000 + "password" * 20_000 + "=" * 50_000 + "http://" * 20_000 + "x=" * 20_000
    assert redact(text, {}) == text


RANDOM = "Zq3vT8mK1xW5bN7cR2dL9fGh4jPs6yAe"
SECRET_TEXTS = [
    *(f"{name}=hunter-{RANDOM}" for name in ("DB_PASS", "PGPASS", "SSHPASS", "MYSQL_PASS", "PASSPHRASE", "HF_TOKENS")),
    *(f"{name}={RANDOM}" for name in ("OPENAI_KEY_1", "AZURE_OPENAI_KEY2", "SIGNING_KEY_B64", "SENTRY_DSN", "COOKIE")),
    *(f"{name}={RANDOM}" for name in ("ENCRYPTION_KEY_BASE64", "AWS_ACCESS_KEY_ID", "BEARER", "api_keys", "X_SAS")),
    *(f"{prefix}{RANDOM}" for prefix in ("nvapi-", "npm_", "pypi-", "sk_live_", "gsk_", "xai-", "glsa_", "r8_")),
    *(f"{prefix}{RANDOM}" for prefix in ("ya29.", "GOCSPX-", "hf_", "ghp_", "dckr_pat_", "hvs.", "whsec_", "pplx-")),
    f"passphrase: hunter2-{RANDOM}",
    f"AZURE_STORAGE_CONNECTION_STRING='AccountName=a;AccountKey={RANDOM}=='",
    f"prog --password {RANDOM} --verbose",
    f"prog --api-key={RANDOM}",
    f"curl -u somebody:{RANDOM} https://h",
    f"https://hooks.slack.com/services/T0/B0/{RANDOM}",
    f"https://a.blob.core.windows.net/c?sv=2022&sig={RANDOM}%3D",
    f"https://{RANDOM}@git.example/x",
    f"redis://:{RANDOM}@h:6379",
    f"HTTPS_PROXY=http://me:p@ss{RANDOM}@proxy:3128",
    f"postgresql+psycopg2://optuna:{RANDOM}@h/study mysql+pymysql://o:{RANDOM}@h/s",
    f"Client error '401' for url 'https://h/v1beta/models?alt=sse&key={RANDOM}'",
    f"JobId=7 Comment=WANDB_API_KEY={RANDOM} Command=/x/job.sh --api-key={RANDOM} AdminComment=token:{RANDOM}",
    f"{{'authorization': 'Bearer {RANDOM}', 'x-api-key': '{RANDOM}', 'api-key': '{RANDOM}'}}",
    f"Proxy-Authorization: Basic {RANDOM}",
    f"Set-Cookie: session={RANDOM}; HttpOnly",
    f"{{'db_password': 'with spaces {RANDOM}'}}",
    f'"log": "a\\nhf_{RANDOM}\\nb"',
    f"\x1b[31mHF_TOKEN\x1b[0m={RANDOM}",
    f"client_secret: {RANDOM}",
    f"\x1b[1;31mDB_PASS=\x1b[0m{RANDOM}",
]


@pytest.mark.parametrize("text", SECRET_TEXTS)
def test_names_and_formats_of_secrets_are_masked(text):
    masked = redact(text, {})
    assert RANDOM not in masked
    assert redact(masked, {}) == masked


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ('api_key = "abc123def456ghi"', "abc123"),
        ("api_key=sk.abc(def123", "def123"),
        ("password=abc.def(1Z9", "1Z9"),
        ("password: a.b(c9d", "c9d"),
        ("api_key=Pa.ss[word1", "word1"),
        ("DB_PASS=Xk(9vq22Lm", "9vq22Lm"),
        ("DB_PASS=open(sesame)", "sesame"),
        ("password = hunter2.horse", "horse"),
        ("token = xy12.ab34cd(e)", "ab34cd"),
        ("SECRET=secret", "=secret"),
        ("SECRET_TOKEN=token", "=token"),
        ("password=word", "=word"),
        ('TOTAL_KEY = "Zq3vT8mK1x"', "Zq3vT8"),
        ("token=AbCdEfGhIjKlMnOpQrSt", "AbCdEf"),
        ("password: correcthorsebatterystaple", "battery"),
        ("Bearer AbCdEfGhIjKl", "AbCdEf"),
        ("Authorization: Bearer credential", "credential"),
    ],
)
def test_values_that_look_a_little_like_code_or_words_are_masked(text, secret):
    masked = redact(f"before\n{text}\nafter", {})
    assert secret not in masked
    assert masked.endswith("\nafter")


KEY_LINES = [
    *("-----BEGIN OPENSSH PRIVATE KEY-----", "b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQAAAAAAAAABAAAAMwAAAAtzc2gtZW"),
    *("QyNTUxOQAAACBThXCzdeUgGFSkiVzA+f6i98MRUY5qZL4Z6K1VNcVVLAAAAJDrYtfb62LX", "AAAEBq+A==", "qR7w"),
    "-----END OPENSSH PRIVATE KEY-----",
]


@pytest.mark.parametrize("prefix", ["", "[rank0]: ", "    ", "2024-05-06 12:34:56 stderr | ", "  key: |\n    "])
@pytest.mark.parametrize("is_cut", ["", "end", "begin"])
def test_private_keys_over_lines_are_masked(prefix, is_cut):
    lines = KEY_LINES[1 if is_cut == "begin" else 0 : -1 if is_cut == "end" else None]
    text = "before /usr/lib/python3\n" + "".join(f"{prefix}{line}\n" for line in lines) + "step 7 loss 2.5\n" * 3
    masked = redact(text, {})
    assert [line for line in KEY_LINES[1:-1] if line in masked] == []
    assert masked.startswith("before /usr/lib/python3\n")
    assert masked.endswith("step 7 loss 2.5\n" * 3)


def test_private_keys_on_one_line_and_between_lines_of_other_ranks_are_masked():
    escaped = '{"key": "' + "\\n".join(KEY_LINES) + '", "n": 1}'
    assert redact(escaped, {}) == f'{{"key": "{MASK}", "n": 1}}'
    assert redact(escaped.replace(KEY_LINES[-1], ""), {}) == f'{{"key": "{MASK}", "n": 1}}'
    mixed = "".join(f"[rank0]: {line}\n[rank1]: step 7 of 100\n" for line in KEY_LINES)
    masked = redact(mixed, {})
    assert [line for line in KEY_LINES[1:-1] if line in masked] == []
    assert masked.count("step 7 of 100") == len(KEY_LINES)


def test_passwords_in_addresses_of_the_environment_are_masked_wherever_they_occur():
    environment = {
        "HTTPS_PROXY": "http://me:p%40ss-w0rd@proxy:3128",
        "STUDY": "mysql://o:tr0mbone@h/s",
        "HOME": "/home",
    }
    text = "407 for user me with p@ss-w0rd (p%40ss-w0rd); tr0mbone at proxy:3128"
    assert redact(text, environment) == f"407 for user me with {MASK} ({MASK}); {MASK} at proxy:3128"


def test_values_of_the_environment_are_masked_in_every_spelling():
    value = 'corr"ect/hörse+battery staple!'
    environment = {"DB_PASS": value, "SSH_PRIVATE_KEY": "first-line-of-it\nsecond-line-of-it", "HOME": "/home/x"}
    for spelling in (value, quote(value), quote(value, safe=""), json.dumps(value)[1:-1], "second-line-of-it"):
        assert redact(f"a {spelling} b", environment) == f"a {MASK} b"
    for before in ("", "u", "us", "user:"):
        coded = base64.b64encode(f"{before}{value}".encode()).decode()
        assert coded[8:-8] not in redact(f"a {coded} b /home/x", environment)


@pytest.mark.parametrize(
    "text",
    [
        "tokens=4096 tokens_per_s: 12345.6 tokens/s=7",
        "tokenizer_path=/data/llama3/tokenizer.model",
        "key=value; keys: 12; KV cache usage: 4.5%",
        "max_tokens: 100\ncache_key: sha256x4f2a9\nsort_key=name12345",
        "image sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "commit 3f786850e387550fdab836ed7e6dc881de23001b of branch main",
        "num_key_value_heads=8 NUM_KEY_VALUE_HEADS=8 forward_pass: 12.3ms BYPASS=yes",
        "HF_TOKEN_PATH=/home/x/.cache/token NCCL_IB_PKEY=0x7fff",
        "pwd: /home/x/y PWD=/home/x/y OLDPWD=/home/x",
        "docker run -u 1000:1000 image; install --user name",
        "node1:123:456 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "task-0123456789abcdef0123 disk-usage_of_the_machine mask-0123456789abcdefghij",
        "HF_TOKEN=$HF_TOKEN API_KEY=${API_KEY} pad_token='<|finetune_right_pad_id|>' TOKENIZERS_PARALLELISM=false",
        "https://pypi.example/packages/torch-2.6.0-cp311-cp311-manylinux_2_28_x86_64.whl (766.7 MB)",
        "compute-capability 9.0 driver=570.86.15 uuid=GPU-5d3a1f2b-0000-1111-2222-333344445555",
        "AUTH_METHOD=kerberos SECRET_FILE=/run/secrets/x",
        "PyJWT==2.3.0 PyJWT==2.10.0rc1 python-jwt==4.1.0.post1 tokenizers==0.21.0+cu121",
        "    token = uuid.uuid4().hex\n    secret = match.group(1)\n    api_key=api_key,\n    secret=os.environ[name]",
        'AUTHENTICATION = "authentication" MAX_KEYS = 10_000',
        "finds keys:\n    break\n    return",
        "    api_key = self.api_key\n    login(password=args.password, token=tokens[0])\n    SECRET = settings.SECRET",
        'TOTAL_KEY = "Total"\nSORT_KEY = "name"\nBOS_TOKEN = "begin"\nKEY = "key"\nPASSWORD = "password"',
        "a bearer credential, Bearer authentication, the bearer certificate; x-api-key: required",
        "def f(token: Optional[str] = None, password: str = None, *, secret: SecretStr, authorization: Optional[str]):",
        "    api_key: builtins.str\n    credential: google.auth.credentials.Credentials",
        "    token = make_token(\n        name, 12)\n    secret = base64.b64decode(text)[0]\n    key = f(a,\n b)",
    ],
)
def test_honest_logs_and_settings_are_unchanged(text):
    assert redact(text, {}) == text


@pytest.mark.parametrize("piece", ["token=", "eyJ", "-----BEGIN PRIVATE KEY-----", "token='", "eyJ_", "authorization:"])
def test_repeated_pieces_end(piece):
    masked = redact(piece * (2**17 // len(piece)), {})
    assert masked == redact(masked, {})


LINES = st.one_of(
    st.sampled_from([*SECRET_TEXTS, *KEY_LINES, "step 7 loss=2.5 tokens_per_s: 12345.6", "KeyError: 'a.key'", ""]),
    st.tuples(st.sampled_from(SECRET_TEXTS), st.text(max_size=8)).map("".join),
    st.text(alphabet="TOKENtoken_=:-@/ sk\u00e9", max_size=30),
)


@settings(max_examples=30, deadline=None)
@given(st.lists(LINES, max_size=60), st.sampled_from(["\n", "\r", " "]))
def test_a_long_text_is_masked_as_a_short_one(lines, between):
    """A long text is scanned in another way (`Trigrams`), which must not show."""
    environment = {"HF_TOKEN": RANDOM[::-1], "DB_PASS": 'corr"ect/h\u00f6rse'}
    text = between.join([*lines, RANDOM[::-1], 'corr"ect/h\u00f6rse'])
    filler = "\n" + "step 7\n" * 1000
    assert redact(text + filler, environment) == redact(text, environment) + filler


def test_lines_after_words_about_a_private_key_are_unchanged():
    assert redact("`-----BEGIN PRIVATE KEY-----`\n    break\nend\n", {}) == f"`{MASK}\n    break\nend\n"


@settings(max_examples=40, deadline=None)
@given(
    st.recursive(
        LINES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(LINES, inner | st.integers(), max_size=4)
    )
)
def test_a_masked_json_text_is_still_json(value):
    for indent in (None, 1):
        text = json.dumps([value, "\n".join([*SECRET_TEXTS, *KEY_LINES]), value], indent=indent)
        masked = redact(text, {})
        assert len(json.loads(masked)) == 3
        assert RANDOM not in masked
