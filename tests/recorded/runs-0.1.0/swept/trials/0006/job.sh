# nothing runs: the recorded row of tp=16 pp=1 dp=32 zero_stage=0 micro_batch_size=8 is read (The Ultra-Scale Playbook, benchmark figure (Hugging Face nanotron team))
