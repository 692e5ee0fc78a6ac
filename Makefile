# farshore: `make demo` shows it, `make test` runs everything CI runs.
# Both set up what they need (scripts/setup) on a Debian machine with a Rust toolchain.

CARGO ?= cargo

# With crash points and defects switched in, and optimised. Always all packages, and not those of
# which something is run: which features a crate from elsewhere has depends on who asks for it, and
# each choice of packages would have it compiled once more.
FAULTS = --workspace --features farshore-cli/faults --config profile.dev.opt-level=1
# The scenarios, all in the package farshore-tests. Most of a scenario's time it waits, for a line, a
# server or a pause: so many side by side keep two processors at work.
SCENARIOS = $(patsubst tests/scenarios/%.rs,--test %,$(wildcard tests/scenarios/*.rs))
SIDE_BY_SIDE = 4

.PHONY: setup setup-monitor demo test test-pure test-crates test-scenarios test-versions test-browser stress stress-study bench bench-disk lint fuzz clean

setup:
	@scripts/setup

## Replicate between two throwaway servers under load, kill Farshore once, compare every table.
demo: setup
	@$(CARGO) build --release -p farshore-cli
	@target/release/farshore demo

## Everything CI runs.
test: setup setup-monitor lint test-crates test-scenarios

# A browser and promtool are for tests of the monitor alone: where they cannot be had, those tests
# say that they are skipped, and why.
setup-monitor:
	@scripts/setup --browser || echo "skipped: the monitor in a browser: it cannot be installed here"
	@scripts/setup --promtool || echo "skipped: promtool: it cannot be installed here"

## rustfmt, clippy with warnings as errors, and cargo-deny where it is installed.
lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	@if ! $(CARGO) deny --version >/dev/null 2>&1; then echo "skipped: cargo-deny is not installed"; \
	 elif $(CARGO) deny fetch db >/dev/null 2>&1; then $(CARGO) deny check; \
	 else echo "skipped: cargo-deny's advisory database cannot be fetched; the rest is checked"; \
	   $(CARGO) deny check bans licenses sources; fi

## Codecs and pure parts only: seconds (one test asks a throwaway server for real bytes).
test-pure:
	$(CARGO) test -p farshore-model -p farshore-wire -p farshore-fault --lib --tests

## Each crate's own tests, on private throwaway clusters, side by side.
test-crates:
	$(CARGO) test --workspace --exclude farshore-tests --no-fail-fast
	$(CARGO) test $(FAULTS) --test faults --test crashes
	$(CARGO) test -p farshore-fault --features faults --lib

## Whole-system scenarios on real servers, with fault injection.
test-scenarios:
	$(CARGO) test $(FAULTS) $(SCENARIOS) --no-fail-fast -- --test-threads=$(SIDE_BY_SIDE)

## The monitor in Debian's Chromium; pictures of every view go to out/pictures.
test-browser:
	@scripts/setup --browser
	FARSHORE_PICTURES=$(CURDIR)/out/pictures $(CARGO) test $(FAULTS) --test monitor -- \
	  --nocapture browser

## The end-to-end scenario between every two of PostgreSQL 14, 15, 16, 17 and 18: minutes.
test-versions:
	@scripts/setup --all-versions
	FARSHORE_VERSIONS=all $(CARGO) test $(FAULTS) --test versions --no-fail-fast -- \
	  --nocapture --test-threads=2
	FARSHORE_VERSIONS=all $(CARGO) test $(FAULTS) --test mirror -- --nocapture \
	  three_commands other_versions pg_basebackup

## Soak, chaos and fuzz: hours. FARSHORE_SEED replays a failure.
stress: setup
	FARSHORE_KILLS=$${FARSHORE_KILLS:-500} $(CARGO) test $(FAULTS) --test prefix -- --nocapture
	FARSHORE_ROWS=$${FARSHORE_ROWS:-5000000} $(CARGO) test $(FAULTS) --test bounded_memory -- --nocapture
	FARSHORE_LOAD_MB=$${FARSHORE_LOAD_MB:-1024} $(CARGO) test $(FAULTS) --test store_and_forward -- --nocapture
	FARSHORE_TABLES=$${FARSHORE_TABLES:-2000} $(CARGO) test $(FAULTS) --test many -- --nocapture
	FARSHORE_ROUNDS=$${FARSHORE_ROUNDS:-100} $(CARGO) test $(FAULTS) --test types_round_trip -- --nocapture
	FARSHORE_MIRROR_TROUBLES=$${FARSHORE_MIRROR_TROUBLES:-100} $(CARGO) test $(FAULTS) --test mirror -- \
	  --nocapture strictly_serializable_in_mode
	$(MAKE) fuzz FUZZ_SECONDS=$${FUZZ_SECONDS:-600}

STUDY_HOURS ?= 24
## The study's live load for hours, 40 clients on 59 tables that grow all along: some 2 GB of disk a
## minute, and once more for PostgreSQL's own replication.
stress-study:
	@SCALE=$$(( $(STUDY_HOURS) * 6 )) RUNS=1 $(MAKE) bench SCENARIO=study CASES=streams-3

FUZZ_SECONDS ?= 20
## Every decoder against arbitrary bytes (needs a nightly toolchain and cargo-fuzz).
fuzz:
	cd fuzz && for target in pgoutput pgoutput_stored replication copy_binary backend link_frame mirror server; do \
	  $(CARGO) +nightly fuzz run $$target -- -max_total_time=$(FUZZ_SECONDS) || exit 1; done

## Comparisons with PostgreSQL's own replication. SCENARIO=name prints JSON lines alone.
bench:
	@scripts/setup
	@$(CARGO) build --release -p farshore-cli -p farshore-bench
	@target/release/farshore-bench

## `commission disk` beside fio, taking turns: prints ratios, decides nothing.
bench-disk:
	@scripts/setup --fio
	$(CARGO) test --release -p farshore-commission --test fio -- --ignored --nocapture

clean:
	$(CARGO) clean
	rm -rf out
