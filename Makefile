# The commands for people and for CI. `make` alone lists them.
SHELL := /bin/bash
TARGET := $(or $(CARGO_TARGET_DIR),target)
export CARGO_TARGET_DIR := $(abspath $(TARGET))

# Debian packages, by the command that needs them.
PACKAGES_BUILD := gcc libc6-dev
PACKAGES_GUESTS := qemu-system-x86 user-mode-linux iproute2 cpio
PACKAGES_COUNTS := valgrind
PACKAGES_REGISTRY := etcd-server openssl
PACKAGES_UCX := libucx-dev libclang-dev
PACKAGES_FLOOD := clang libbpf-dev libelf-dev zlib1g-dev
PACKAGES_BENCH := dpdk-dev
PACKAGES_TSHARK := tshark
PACKAGES_PROMETHEUS := prometheus
PACKAGES_PACKAGE := mmdebstrap systemd-container
PACKAGES_REPORT := chromium-headless-shell

# Paths of `make demo ATTACH=tap`: the offload behind a tap beside that of a vhost-user port.
ATTACHED := --paths tap,ack-offload,attached --down-paths tap,off,attached
# The case of `make demo` that the variables give; without one, its short form.
DEMO := $(or $(strip $(if $(SCHED),--sched $(SCHED)) $(if $(LINK),--link $(LINK)) $(if $(FULL),--full) \
	$(if $(ATTACH),$(ATTACHED))),--short)

SEEDS ?= 500
SAMPLE ?= 1000
SEED ?= 1
LIMIT_S ?= 1000000
CPU_HOURS ?= 6
HOSTILE_S ?= 3600
export FUZZ_SECONDS ?= 60
SIM := $(TARGET)/sim/nightporter-sim

.PHONY: help setup build deb demo demo-verify demo-restart demo-toe hpcc compare test test-libvirt hostile sim sim-long mutants-independent tshark tshark-guests coverage figures figures-model map scale simulator fuzz bench fmt clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-19s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## install the Debian packages that building, the guests and the tests need, if missing
	@.ci/packages $(PACKAGES_BUILD) $(PACKAGES_GUESTS)

build: ## build everything, release profile
	@.ci/packages $(PACKAGES_BUILD)
	-@.ci/packages $(PACKAGES_FLOOD)
	cargo build --release --locked --workspace

deb: ## build the Debian packages of the host and of guests, into target
	@.ci/packages $(PACKAGES_BUILD) binutils
	-@.ci/packages $(PACKAGES_FLOOD)
	@packaging/build $(TARGET)

demo: setup ## show in three minutes what three real guests on one core gain; SCHED=eevdf|strict30|rr30|quota30|idle LINK=lan|metro|wan FULL=1 ATTACH=tap: one case, with every path and verdict
	@.ci/packages $(PACKAGES_BUILD)
	-@.ci/packages $(PACKAGES_FLOOD)
	cargo build --release --locked -p nightporter-lab -p nightporterd -p nightporter -p nightporter-boost
	@$(TARGET)/release/nightporter-lab demo $(DEMO)

demo-verify: setup build ## measure both cases of the demo with every path and verdict; fails if one is broken
	@$(TARGET)/release/nightporter-lab demo

demo-restart: setup build ## kill the daemon a hundred times while a real guest sends and receives; three minutes, once built
	@$(TARGET)/release/nightporter-lab test long_transfers

compare: setup build ## compare congestion offload with Linux's own CUBIC over one bottleneck; two hours; RATE_MOST=1000 needs a quiet machine; REORDER=1: frames that come late, 40 minutes
	@$(TARGET)/release/nightporter-lab compare $(if $(RATE_MOST),--rate-most $(RATE_MOST)) $(if $(REORDER),--reorder)

demo-toe: setup build ## compare sockets over the host with guest TCP, between guests of one host and of two
	@.ci/packages openssl
	@$(TARGET)/release/nightporter-lab demo-toe

hpcc: setup build ## run the HPC Challenge between 2 and 4 guests of two hosts, by overlay and by TOE; 20 minutes
	@$(TARGET)/release/nightporter-lab hpcc

test: setup ## check format, lints and licences, run unit, vhost-user and real-guest tests, and count them
	-@.ci/packages $(PACKAGES_COUNTS)
	-@.ci/packages $(PACKAGES_FLOOD)
	-@.ci/packages $(PACKAGES_PACKAGE)
	-@.ci/packages $(PACKAGES_REGISTRY)
	-@.ci/packages $(PACKAGES_UCX)
	-@.ci/packages $(PACKAGES_TSHARK)
	-@.ci/packages $(PACKAGES_PROMETHEUS)
	-@.ci/packages $(PACKAGES_REPORT)
	@.ci/test

test-libvirt: ## try docs/install.md with Debian's libvirt in a container: a minute of downloads, and some of TCG (root)
	@.ci/packages $(PACKAGES_BUILD) $(PACKAGES_PACKAGE)
	@packaging/build $(TARGET)
	@packaging/test $(TARGET)/release $(TARGET)/release/nightporter-guest $(TARGET)/pages "$$([ -d $(TARGET)/toe ] && echo $(TARGET)/toe)" \
		packaging/inside-libvirt libvirt-daemon-system,libvirt-clients,qemu-system-x86,qemu-utils,linux-image-cloud-amd64,kmod,cpio,busybox-static 900

hostile: ## run a hostile front-end beside two VMs; HOSTILE_S=3600 SEED=1 (root, a machine that does nothing else)
	@.ci/packages $(PACKAGES_BUILD)
	cargo test --release --locked -p nightporterd --test hostile --no-run
	NIGHTPORTER_HOSTILE_S=$(HOSTILE_S) NIGHTPORTER_HOSTILE_SEED=$(SEED) \
		cargo test --release --locked -p nightporterd --test hostile whatever_a_front -- --nocapture

sim: simulator ## run SEEDS=500 simulated worlds with faults, and check every invariant at every step
	@$(SIM) run --seeds $(SEEDS)
	@echo "Without the offload, 100 seeds must carry too little:"
	@$(SIM) run --seeds 100 --without-offload | grep '^too few'; test "$${PIPESTATUS[*]}" = '13 0'

sim-long: simulator ## run simulated worlds for CPU_HOURS=6 of processor time; a stopped run goes on
	@$(SIM) long --seeds 1000000 --cpu-hours $(CPU_HOURS) --state $(TARGET)/sim/long.json

mutants-independent: simulator ## break core in SAMPLE=1000 ways that cargo-mutants lists, and print what notices; ROOM="core/src/switch core/src/turn": so many of each; SEED=n SEEDS=n LIMIT_S=n
	@.ci/survey $(SAMPLE) "$(SEED)" $(SEEDS) $(LIMIT_S) $(ROOM)

tshark: SEEDS := 200
tshark: simulator ## compare tshark's expert messages about SEEDS=200 worlds with the offload and without
	@.ci/packages $(PACKAGES_TSHARK)
	@.ci/tshark seeds 0 $(SEEDS)

tshark-guests: setup ## compare tshark's expert messages about captures of the real guests of `make test`; one scenario runs without the offload
	@.ci/packages $(PACKAGES_TSHARK)
	@cargo build --quiet --release --locked -p nightporterd -p nightporter -p nightporter-boost -p nightporter-guest -p nightporter-lab
	@.ci/tshark guests

fuzz: ## run every fuzz target for FUZZ_SECONDS=60; needs a nightly compiler and cargo-fuzz
	@.ci/packages $(PACKAGES_BUILD)
	@.ci/fuzz

coverage: ## print the lines of core, and the events in each state, that SEEDS worlds reach
	@.ci/packages $(PACKAGES_BUILD)
	@.ci/coverage $(SEEDS)

figures: setup build ## measure the papers' figures on real guests, into target/report/index.html; hours, a run that is cut off goes on; QUICK=1: a quarter of an hour; FULL=1: a night
	@$(TARGET)/release/nightporter-lab figures --effort $(if $(QUICK),quick,$(if $(FULL),full,usual))

figures-model: simulator ## draw the figures of the vSnoop paper in virtual time, into target/figures
	@$(SIM) figures --out $(TARGET)/figures

map: simulator ## compute docs/will-it-help.md and its pictures, in virtual time; LAB="FILE ..." puts results of the demo beside; minutes
	@$(SIM) map --out docs $(foreach file,$(LAB),--lab $(file))

scale: ## measure one host with up to 10,000 guests and 1,000,000 flows: memory, events per second, cost per packet
	@.ci/packages $(PACKAGES_BUILD)
	@cargo bench --quiet --locked -p nightporter-bench --bench scale

simulator:
	@.ci/packages $(PACKAGES_BUILD)
	@cargo build --quiet --locked --profile sim -p nightporter-sim

bench: ## measure instructions and nanoseconds per packet, bytes per flow, forwarding beside DPDK's net_vhost
	@.ci/packages $(PACKAGES_BUILD)
	-@.ci/packages $(PACKAGES_COUNTS) $(PACKAGES_BENCH)
	cargo bench --locked -p nightporter-bench --bench packet
	cargo bench --locked -p nightporterd --bench forwarding

fmt: ## format the sources
	cargo fmt --all

clean: ## remove everything that was built or downloaded
	cargo clean
