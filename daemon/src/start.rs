//! From a checked configuration to a running worker, and down again.

use std::collections::BTreeSet;
use std::fmt;
use std::io::ErrorKind;
use std::num::NonZeroU64;
use std::path::Path;
use std::sync::{Arc, PoisonError};

use nightporter_core::engine::{AddPortError, Engine, EngineConfig};
use nightporter_core::port::{GuestConfig, PortConfig, PortId, Vlans};
use nightporter_core::time::Duration;
use nightporter_registry::Registry;
use nightporter_registry::etcd::{self, Etcd};
use nightporter_registry::listed::Listed;
use nightporter_registry::tls::Tls;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::Pid;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::arena_file::{self, ArenaFile};
use crate::broker::Broker;
use crate::broker::connector::Connector;
use crate::change::{self, Running};
use crate::charges;
use crate::config::station::at_strangers;
use crate::config::{Config, DaemonConfig, RegistryConfig, Source, VmConfig};
use crate::desk::{ControlServer, LinkWatch, MetricsServer, start_scribe};
use crate::host_check::uneven_mtus;
use crate::opener;
use crate::owners::Owners;
use crate::port::guest::GuestPort;
use crate::port::overlay::OverlayPort;
use crate::port::vhost_user::{PortError, VhostUserConfig, VhostUserPort};
use crate::port::{Lost, Port, Wanted, uplink_port};
use crate::sandbox::Sandbox;
use crate::supervisor::Supervisor;
use crate::sys;
use crate::timer::monotonic_now;
use crate::toe::{GUEST_CID, Member, Proof};
use crate::vhost::listener::Access;
use crate::vhost::signals;
use crate::vhost::vsock::Vsock;
use crate::watchdog;
use crate::worker::{Worker, WorkerConfig};

/// Why the daemon could not start, or stopped. The text says what to do.
#[derive(Clone, Debug)]
pub struct StartError(String);

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for StartError {}

pub(crate) fn error(what: impl fmt::Display, fix: &str) -> StartError {
    StartError(format!("{what}\n    fix: {fix}"))
}

/// Runs the daemon in the calling thread until a signal ends it.
///
/// # Errors
/// Everything that keeps it from starting, found in one go; or one error of the running worker.
pub fn run(config: &Config, source: Source, sandbox: &Sandbox) -> Result<(), Vec<StartError>> {
    let supervisor = sandbox.supervisor.clone().map_err(|e| vec![e])?;
    let (mut worker, arena) = start(config, source, sandbox, supervisor.clone())?;
    tracing::info!("ready: {}", config.summary());
    supervisor.iter().for_each(|supervisor| supervisor.is_ready());
    worker
        .run(|drain| {
            let drain = std::time::Duration::from_millis(drain.as_millis());
            supervisor.iter().for_each(|supervisor| supervisor.is_stopping(drain));
        })
        .map_err(|e| vec![error(format!("the event loop failed: {e}"), "report this")])?;
    signals::finish(); // guests hear of the last frames, such as the last heartbeat
    match worker.owed() {
        0 => {
            if let Err(e) = arena.remove() {
                tracing::warn!("the empty arena cannot be removed: {e}");
            }
            tracing::info!("stopped; no connection is owed bytes");
        }
        owed => tracing::warn!(owed, "stopped; connections are owed bytes, see the next start"),
    }
    Ok(())
}

fn start(
    config: &Config,
    source: Source,
    sandbox: &Sandbox,
    supervisor: Option<Arc<Supervisor>>,
) -> Result<(Worker, Arc<ArenaFile>), Vec<StartError>> {
    let daemon = &config.daemon;
    let signals = block_signals()
        .and_then(|set| SignalFd::with_flags(&set, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC))
        .map_err(|e| vec![error(e, "report this")])?;
    let eye = sandbox.eye.lock().unwrap_or_else(PoisonError::into_inner).take();
    watchdog::start(supervisor, eye)
        .and_then(|()| signals::start())
        .map_err(|e| vec![error(e, "allow more threads")])?;
    raise_file_limit();
    let epoch = epoch().map_err(|e| vec![no_chance(&e)])?;
    let worker_config = WorkerConfig {
        busy_poll: Duration::from_micros(daemon.busy_poll_us),
        drain_timeout: Duration::from_secs(daemon.drain_timeout_s),
        epoch,
    };
    let (engine, arena) = engine(config).map_err(|e| vec![e])?;
    let arena = Arc::new(arena);
    let mut worker = Worker::new(worker_config, engine)
        .map_err(|e| vec![error(format!("no event loop: {e}"), "raise the limit of open files")])?;
    let mut problems = Vec::new();
    let mut check = |result: Result<(), StartError>| problems.extend(result.err());
    check(worker.set_signals(signals).map_err(|e| error(e, "report this")));
    check(watch_links(&mut worker));
    check(worker.set_broker(Arc::clone(&sandbox.broker)).map_err(|e| error(e, "report this")));
    check(open_control(&mut worker, daemon));
    check(crate::booster::start(&mut worker, config).map_err(|e| error(e, "free that path")));
    let broker = &sandbox.broker;
    let scribe = start_scribe().and_then(|scribe| worker.set_scribe(scribe));
    let opener = opener::start(Arc::clone(broker)).and_then(|opener| worker.set_opener(opener));
    check(scribe.and(opener).map_err(|e| error(e, "allow more threads and open files")));
    let uplinks = config.uplinks.iter().cloned().map(Wanted::Uplink);
    for wanted in uplinks.chain(config.overlays.iter().cloned().map(Wanted::Overlay)) {
        check(add_wanted(&mut worker, wanted, broker));
    }
    worker.set_toe_rules(config.toe_rules.clone());
    match &sandbox.owners {
        Err(e) => check(Err(e.clone())),
        Ok(owners) => {
            open_vms(&mut worker, config, owners).into_iter().for_each(|e| check(Err(e)));
        }
    }
    check(open_metrics(&mut worker, daemon));
    check(find_each_other(&mut worker, config, sandbox));
    check(open_doors(&mut worker, sandbox));
    check(allow_changes(&mut worker, config, source, sandbox.clone(), &arena));
    check(place(daemon, crate::booster::is_wanted(config)));
    let warnings = large_mtus(config).into_iter().chain(uneven_mtus(config));
    warnings.chain(at_strangers(config)).for_each(|warning| tracing::warn!("{warning}"));
    check(sandbox.close());
    if !problems.is_empty() {
        if arena.is_new {
            let _ = arena.remove(); // the memory of a daemon that does not run is nobody's
        }
        return Err(problems);
    }
    worker.handle_restart();
    Ok((worker, arena))
}

/// The locations of stations: from etcd, or else from a list.
fn find_each_other(
    worker: &mut Worker,
    config: &Config,
    sandbox: &Sandbox,
) -> Result<(), StartError> {
    let fix = "allow more threads and open files";
    let registry: Box<dyn Registry> = match sandbox.registry.clone()? {
        None => Box::new(Listed::new(config.stations.clone()).map_err(|e| error(e, fix))?),
        Some(at) => Box::new(Etcd::start(at).map_err(|e| error(e, fix))?),
    };
    worker.set_registry(registry).map_err(|e| error(e, fix))
}

/// The way to guests' sockets on other hosts.
fn open_doors(worker: &mut Worker, sandbox: &Sandbox) -> Result<(), StartError> {
    let doors = sandbox.doors.lock().unwrap_or_else(PoisonError::into_inner).take();
    let opened = doors.map_or(Ok(()), |doors| worker.open_doors(doors));
    opened.map_err(|e| error(e, "allow more open files"))
}

/// The registry's addresses, with the content of its files.
pub(crate) fn registry_of(
    registry: &RegistryConfig,
    connector: Connector,
) -> Result<etcd::Config, StartError> {
    let (tls, user) = registry_files(registry)?;
    let (members, prefix, ttl_s) = (registry.etcd.clone(), registry.prefix.clone(), registry.ttl_s);
    let connector = etcd::Connector::new(move |member| connector.connect(member));
    Ok(etcd::Config { members, connector, tls, user, prefix, ttl_s })
}

/// How to speak TLS, and a name with its password.
type Secrets = (Option<etcd::Tls>, Option<(String, String)>);

/// Reads the files of a registry.
pub(crate) fn registry_files(registry: &RegistryConfig) -> Result<Secrets, StartError> {
    let says_tls = registry.etcd.iter().any(|member| member.is_tls);
    let fix = "give PEM files that the daemon can read";
    let own = registry.certificate.clone().zip(registry.key.clone());
    let files = etcd::Files { ca: registry.ca.clone(), own };
    let tls = says_tls.then(|| etcd::Tls::new(files)).transpose();
    let tls = tls.map_err(|e| error(format!("registry: {e}"), fix))?;
    let user = match (&registry.user, &registry.password_file) {
        (Some(user), Some(path)) => {
            let password = std::fs::read_to_string(path).map_err(|e| {
                let what = format!("registry: {}: {e}", path.display());
                error(what, "give a file that the daemon can read, with the password in it")
            })?;
            Some((user.clone(), password.trim_end_matches('\n').to_owned()))
        }
        _ => None,
    };
    Ok((tls, user))
}

/// Reads the files with which this host proves its identity, if there are any.
pub(crate) fn proof_of(config: &Config) -> Result<Option<Tls<Proof>>, StartError> {
    let Some(files) = config.toe.as_ref().and_then(|toe| toe.proof.clone()) else {
        return Ok(None);
    };
    let fix = "give PEM files that the daemon can read; docs/configuration.md says what hosts show";
    let encrypts = config.toe.as_ref().is_some_and(|toe| toe.encrypt);
    let read = if encrypts { Proof::of_streams } else { Proof::of_tickets };
    let proof = Tls::of(files, read).map_err(|e| error(format!("toe: {e}"), fix))?;
    for overlay in &config.overlays {
        let address = overlay.local.ip();
        if !proof.config().is_of(address) {
            let fix = "give a certificate with a subjectAltName of IP:ADDRESS for each overlay";
            let what =
                format!("toe: the certificate is not for {address}, where {} is", overlay.name);
            return Err(error(what, fix));
        }
    }
    Ok(Some(proof))
}

/// Ports may come, go and change. Before the worker has its place, which threads inherit.
fn allow_changes(
    worker: &mut Worker,
    config: &Config,
    source: Source,
    sandbox: Sandbox,
    arena: &Arc<ArenaFile>,
) -> Result<(), StartError> {
    charges::set_max(config.charges_max());
    let running =
        Running { config: Arc::new(config.clone()), by_command: BTreeSet::new(), size: arena.size };
    change::start(source, sandbox, Arc::clone(arena))
        .and_then(|preparer| worker.set_changes(preparer, running))
        .map_err(|e| error(e, "allow more threads and open files"))
}

/// The engine over its arena.
fn engine(config: &Config) -> Result<(Engine<'static>, ArenaFile), StartError> {
    make_parent(&config.daemon.arena)?;
    let size = arena_file::size_for(config.budget_sum(), config.flows_sum());
    let (arena, file) =
        arena_file::open(&config.daemon.arena, size).map_err(|e| StartError(e.to_string()))?;
    let hash_seeds = random().map_err(|e| no_chance(&e))?;
    let engine_config = EngineConfig::new(config.flows_sum(), hash_seeds);
    Ok((Engine::new(monotonic_now(), engine_config, arena), file))
}

/// A number that no daemon has had before.
fn epoch() -> std::io::Result<NonZeroU64> {
    random().map(|words| NonZeroU64::new(words[0]).unwrap_or(NonZeroU64::MIN))
}

fn no_chance(e: &std::io::Error) -> StartError {
    error(format!("getrandom: {e}"), "report this")
}

/// Numbers that nobody can guess.
fn random() -> std::io::Result<[u64; 4]> {
    let mut bytes = [0; 32];
    // So few come whole (getrandom(2)).
    getrandom(&mut bytes, GetRandomFlags::empty())?;
    let (words, _) = bytes.as_chunks();
    Ok(std::array::from_fn(|i| u64::from_le_bytes(words[i])))
}

/// Blocks all signals but those that say that the program is wrong, are meant for the terminal, or
/// do nothing: the others arrive as events, and none of them kills. To be called before the first
/// thread is made, so that it holds for all.
///
/// # Errors
/// None that is known.
pub fn block_signals() -> nix::Result<SigSet> {
    let mut set = SigSet::all();
    for wrong in [
        Signal::SIGABRT,
        Signal::SIGBUS,
        Signal::SIGFPE,
        Signal::SIGILL,
        Signal::SIGQUIT,
        Signal::SIGSEGV,
        Signal::SIGSYS,
        Signal::SIGTRAP,
    ] {
        set.remove(wrong);
    }
    for harmless in [
        Signal::SIGCHLD,
        Signal::SIGCONT,
        Signal::SIGPIPE, // ignored by Rust's runtime; blocked, each would be an event
        Signal::SIGTSTP,
        Signal::SIGTTIN,
        Signal::SIGTTOU,
        Signal::SIGURG,
        Signal::SIGWINCH,
    ] {
        set.remove(harmless);
    }
    set.thread_block()?;
    Ok(set)
}

/// A VM takes about ten descriptors, and the usual soft limit is 1024.
fn raise_file_limit() {
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        // With the old soft limit, opening one descriptor too many reports it.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
}

fn watch_links(worker: &mut Worker) -> Result<(), StartError> {
    LinkWatch::new()
        .and_then(|links| worker.set_links(links))
        .map_err(|e| error(format!("cannot watch interfaces: {e}"), "allow netlink sockets"))
}

fn open_control(worker: &mut Worker, daemon: &DaemonConfig) -> Result<(), StartError> {
    make_parent(&daemon.control)?;
    let control = ControlServer::new(&daemon.control)
        .map_err(|e| error(e, "stop the other daemon, or choose another daemon.control"))?;
    worker.set_control(control).map_err(|e| error(e, "report this"))
}

fn open_metrics(worker: &mut Worker, daemon: &DaemonConfig) -> Result<(), StartError> {
    let Some(address) = daemon.metrics else { return Ok(()) };
    let fix = "choose another port with daemon.metrics, or turn it \"off\"";
    let server = MetricsServer::new(address)
        .map_err(|e| error(format!("metrics: cannot listen on {address}: {e}"), fix))?;
    worker.set_metrics(server).map_err(|e| error(e, "report this"))
}

/// Why a port could not be opened.
#[derive(Clone, Debug)]
pub(crate) struct OpenFailure {
    /// For status.
    pub(crate) what: String,
    /// The same, with its fix.
    pub(crate) error: StartError,
    /// Only a restart helps.
    pub(crate) is_final: bool,
}

/// Opens the interface or sockets of this host that a port needs.
pub(crate) fn open(wanted: &Wanted, broker: &Broker) -> Result<Port, OpenFailure> {
    let failure = |what: &str, error: &dyn fmt::Display, is_final| OpenFailure {
        what: what.to_owned(),
        error: StartError(error.to_string()),
        is_final,
    };
    match wanted {
        Wanted::Uplink(config) => {
            broker.open(config).map(Port::Uplink).map_err(|e| failure(e.what(), &e, e.is_final))
        }
        Wanted::Overlay(config) => {
            let hash_seeds = random().map_err(|e| failure("getrandom", &no_chance(&e), true))?;
            let opened = OverlayPort::open(config, hash_seeds, &broker.sockets);
            let mut port = opened.map_err(|e| failure(e.what(), &e, e.is_final))?;
            port.has_small_buffers = broker.enlarge(&config.name, &port.sockets(), false);
            Ok(Port::Overlay(Box::new(port)))
        }
    }
}

/// Adds an uplink or overlay. If it cannot be opened yet, for example because its bridge or address
/// comes later than the daemon, the others still work: its port is there, down, and is tried again.
fn add_wanted(worker: &mut Worker, wanted: Wanted, broker: &Broker) -> Result<(), StartError> {
    let config = uplink_port(wanted.name(), wanted.network());
    let port = match open(&wanted, broker) {
        Ok(port) => port,
        Err(failure) if failure.is_final => return Err(failure.error),
        Err(OpenFailure { what: why, error, .. }) => {
            tracing::error!("{error}\n    the daemon tries again every second");
            Port::Lost(Box::new(Lost { wanted, why }))
        }
    };
    add_port(worker, port, config).map(|_| ())
}

/// Opens the ports of all VMs. If a socket cannot be made, for example because another file has its
/// path, the other VMs still work, and it is tried again. One whose owner does not exist is nobody
/// else's. Only if all VMs have a problem it is an error.
fn open_vms(worker: &mut Worker, config: &Config, owners: &Owners) -> Vec<StartError> {
    let limited = charges::memory_is_limited();
    let mut problems = Vec::new();
    for vm in &config.vms {
        let opened = open_vm(worker, vm, owners.access(vm), limited);
        match (opened, owners.problem(vm)) {
            (Ok(None), None) => {}
            (Ok(_), Some(e)) => {
                let what = StartError(format!("vm {}: {e}", vm.name));
                problems.push((what, "only the daemon's user and root can use its socket so far"));
            }
            (Ok(Some(e)), None) => problems.push((e, "the daemon tries again every second")),
            (Err(e), _) => {
                problems.push((e, "the VM has no port until the daemon is started again"));
            }
        }
    }
    if problems.len() == config.vms.len() {
        return problems.into_iter().map(|(e, _)| e).collect();
    }
    for (e, next) in problems {
        tracing::error!("{e}\n    {next}");
    }
    Vec::new()
}

/// Opens the port of a VM. `Some`: it has no socket yet.
fn open_vm(
    worker: &mut Worker,
    vm: &VmConfig,
    access: Access,
    memory_is_limited: bool,
) -> Result<Option<StartError>, StartError> {
    let without_parent = make_parent(&vm.socket).err();
    let explain = |e: PortError| {
        let fix = if let PortError::Listen(e) = &e { e.fix() } else { "correct that key" };
        error(format!("vm {}: {e}", vm.name), fix)
    };
    let device = device_of(vm, access, memory_is_limited);
    let mut port = VhostUserPort::without_socket(&device).map_err(explain)?;
    let without_socket = port.listen().err().map(|e| explain(e.into()));
    let port = Port::Guest(Box::new(GuestPort::new(port, vm.vlan)));
    let config = PortConfig::guest(&vm.name, policy_of(vm)).in_network(network_of(&vm.network));
    let id = add_port(worker, port, config)?;
    worker.set_limits(id, vm);
    let mut toe_without_socket = None;
    if let Some((device, member)) = toe_of(vm, access, memory_is_limited) {
        let mut port = VhostUserPort::with(&device, Vsock { cid: GUEST_CID });
        toe_without_socket = port.listen().err().map(|e| explain(e.into()));
        worker.add_toe(id, port, member);
    }
    Ok(without_socket.or(toe_without_socket).map(|e| without_parent.unwrap_or(e)))
}

/// The device of a VM.
pub(crate) fn device_of(vm: &VmConfig, access: Access, memory_is_limited: bool) -> VhostUserConfig {
    VhostUserConfig {
        name: vm.name.clone(),
        socket: vm.socket.clone(),
        access,
        mac: vm.mac,
        mtu: Some(vm.mtu),
        queue_pairs: vm.queue_pairs,
        allow_unsealed_memory: vm.allow_unsealed_memory,
        memory_max: vm.memory_max,
        memory_is_limited,
    }
}

/// Its socket device, and what the virtual TOE has to know of it; `None`: it has none.
pub(crate) fn toe_of(
    vm: &VmConfig,
    access: Access,
    memory_is_limited: bool,
) -> Option<(VhostUserConfig, Member)> {
    let device = VhostUserConfig {
        name: toe_name(&vm.name),
        socket: vm.toe_socket()?,
        ..device_of(vm, access, memory_is_limited)
    };
    let member = Member {
        ips: vm.ips.clone().unwrap_or_default(),
        network: (network_of(&vm.network).into(), vm.vlan),
        isolated: vm.isolated,
        to_itself: vm.toe_to_itself,
    };
    Some((device, member))
}

/// The name of a VM's socket device, which no VM can have.
pub(crate) fn toe_name(vm: &str) -> String {
    format!("{vm}/toe")
}

/// The policy of a VM for the engine.
pub(crate) fn policy_of(vm: &VmConfig) -> GuestConfig {
    GuestConfig {
        mac: vm.mac,
        ips: vm.ips.clone(),
        isolated: vm.isolated,
        trusted: vm.trusted,
        vlans: match (vm.vlan, &vm.trunk) {
            (Some(vlan), _) => Vlans::Access(vlan),
            (None, Some(trunk)) => Vlans::Trunk(trunk.clone()),
            (None, None) => Vlans::Any,
        },
        ack_offload: vm.ack_offload,
        local: vm.local,
        guest_ttl: vm.guest_ttl,
        congestion_offload: vm.congestion_offload,
        congestion_control: vm.congestion_control,
        budget_bytes: vm.budget,
        flows_max: vm.flows_max,
        mtu: vm.mtu,
    }
}

/// The engine's name for a network.
pub(crate) fn network_of(name: &Option<String>) -> &str {
    name.as_deref().unwrap_or_default()
}

/// Makes the directory of `path`, if its own parent exists.
pub(crate) fn make_parent(path: &Path) -> Result<(), StartError> {
    match path.parent().map(|dir| (dir, std::fs::create_dir(dir))) {
        Some((dir, Err(e))) if e.kind() != ErrorKind::AlreadyExists => {
            let fix = format!("mkdir -p {}", dir.display());
            Err(error(format!("cannot make the directory of {}: {e}", path.display()), &fix))
        }
        _ => Ok(()),
    }
}

fn add_port(worker: &mut Worker, port: Port, config: PortConfig) -> Result<PortId, StartError> {
    let name = config.name.clone();
    worker.add_port(port, config).map_err(|e| match e {
        AddPortError::MacTaken => error(format!("{name}: the MAC is taken"), "choose another"),
        AddPortError::NameTaken => error(format!("{name}: the name is taken"), "choose another"),
        AddPortError::TooManyPorts => {
            error(format!("{name}: one port too many"), "run a second daemon for some of the VMs")
        }
        AddPortError::BudgetExceedsArena => {
            error(format!("{name}: the budgets exceed the arena"), "report this")
        }
    })
}

/// Guests that are told a larger MTU than that of an uplink or overlay of their network lose their
/// large packets there.
pub(crate) fn large_mtus(config: &Config) -> Vec<String> {
    let mtu_of = |ifname: &String| {
        let path = format!("/sys/class/net/{ifname}/mtu");
        std::fs::read_to_string(path).ok()?.trim().parse::<u16>().ok()
    };
    let uplinks = config.uplinks.iter().filter_map(|uplink| {
        let (name, ifname) = (&uplink.name, &uplink.ifname);
        let fix = format!("ip link set {ifname} mtu N, or lower vm.mtu");
        Some((format!("uplink.{name}"), &uplink.network, mtu_of(ifname)?, 0, fix))
    });
    let overlays = config.overlays.iter().map(|overlay| {
        let (name, fix) = (&overlay.name, "lower vm.mtu");
        (format!("overlay.{name}"), &overlay.network, overlay.mtu, 4, fix.to_owned())
    });
    // A VLAN tag takes its place in a datagram.
    let told = |vm: &VmConfig, tag: u16| match vm.vlan.is_some() || vm.trunk.is_some() {
        true => vm.mtu.saturating_add(tag),
        false => vm.mtu,
    };
    let larger = |(port, network, mtu, tag, fix): (String, &Option<String>, u16, u16, String)| {
        let vms = config.vms.iter().filter(|vm| told(vm, tag) > mtu && vm.network == *network);
        let vms: Vec<_> = vms.map(|vm| vm.name.as_str()).collect();
        (!vms.is_empty()).then(|| {
            let vms = vms.join(", ");
            format!(
                "{port} has an MTU of {mtu}, and less than {vms}: large packets vanish\n    \
                 fix: {fix}"
            )
        })
    };
    uplinks.chain(overlays).filter_map(larger).collect()
}

/// Places the worker's thread. With boost, the booster may give it its class (BST-06).
fn place(daemon: &DaemonConfig, boosts: bool) -> Result<(), StartError> {
    if let Some(cpu) = daemon.cpu {
        let mut set = CpuSet::new();
        set.set(cpu)
            .and_then(|()| sched_setaffinity(Pid::from_raw(0), &set))
            .map_err(|e| error(format!("cpu = {cpu}: {e}"), "give a core that is online: nproc"))?;
    }
    if daemon.rt_priority > 0 {
        let placed = sys::set_realtime(daemon.rt_priority);
        placed.or_else(|e| if boosts { Ok(()) } else { Err(e) }).map_err(|e| {
            let what = format!("rt_priority = {}: {e}", daemon.rt_priority);
            error(what, "run as root or with LimitRTPRIO=; in a cgroup give it cpu.rt_runtime_us")
        })?;
    }
    Ok(())
}
