# SPDX-License-Identifier: Apache-2.0
# What a user or a contributor calls. Each target says what it does: `make help`.

.PHONY: help demo soak test test-all test-aarch64 fuzz bench reproduce python lint deny packages

help: ## This list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  make \1\t/' | expand -t 24

demo: packages ## Squeeze a running stock guest to half, kill the daemon once, verify every byte
	cargo build --release --package pagetide --package pagetide-guestkit
	target/release/demo $(DEMO_FLAGS)

soak: ## An hour of verified loads in a real guest, its daemon killed again and again
	scripts/soak $(SOAK_FLAGS)

test: packages ## What each change must pass: format, lints, rules, model checks, units, kernel tests, guests
	scripts/test

test-all: packages ## And what takes long: fuzz targets, AArch64, four guests under one budget, a guest's guest, benches of networks, five minutes of soak
	scripts/test --all

test-aarch64: packages ## Build for AArch64, and the unit tests under qemu-user
	scripts/install-packages gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user
	scripts/test-aarch64

fuzz: packages ## Every fuzz target for a minute (FUZZ_FLAGS="--seconds 600 open" for ten minutes of one)
	scripts/fuzz $(FUZZ_FLAGS)

bench: packages ## Every bench against its peer, in the same run; hours (BENCH_FLAGS="gmem-va blk" for some)
	cargo build --release --package pagetide --package pagetide-guestkit
	scripts/bench $(BENCH_FLAGS)

reproduce: ## The papers: HyperTRIO's findings checked here, figures of VPRI, Taiji and NPF beside those of `make bench`
	cargo build --release --package pagetide
	target/release/pagetide sim findings
	target/release/pagetide sim figures --out target/figures
	target/release/pagetide-lab reproduce --reports target/bench

python: ## The Python package: a wheel in a fresh environment, its tests, notebooks and types (PYTHON_FLAGS=--ray)
	cargo build --release --package pagetide --package pagetide-lab
	scripts/python $(PYTHON_FLAGS)

lint: ## Format, clippy and the repository's own rules
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	cargo xtask tidy
	cargo xtask circles

deny: packages ## The crates that we build with: licences, sources, duplicates, known vulnerabilities
	scripts/deny

packages:
	@scripts/install-packages
