//! From a checked configuration to a running daemon, and down again.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::sync::{Arc, PoisonError};

use nightporter_core::engine::{Engine, EngineConfig};
use nightporter_core::store::arena::ArenaSize;
use nightporter_core::time::Duration;
use nightporter_registry::Registry;
use nightporter_registry::etcd::{self, Etcd};
use nightporter_registry::listed::Listed;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::Pid;

use crate::arena_file::{self, ArenaFile};
use crate::booster;
use crate::broker::connector::Connector;
use crate::change::{Failure, Means, Prepared, Preparer, Running};
use crate::charges;
use crate::config::registry_files::registry_files;
use crate::config::station::at_strangers;
use crate::config::warnings::uneven_mtus;
use crate::config::{Config, DaemonConfig, RegistryConfig, Source, VmConfig};
use crate::control::{
    Bridges, Control, ControlServer, ControlThread, Endpoints, Interfaces, LinkWatch, MetricsServer,
};
use crate::errors::{StartError, error};
use crate::owners::{Access, OWN, Owners};
use crate::port::build::{Openings, make_parent};
use crate::random::{no_chance, random};
use crate::sandbox::Sandbox;
use crate::sockets::orders::sockets_mail;
use crate::sockets::worker::{Beginning, SocketsThread};
use crate::supervisor::Supervisor;
use crate::sys;
use crate::timer::monotonic_now;
use crate::vhost::{locker, signals};
use crate::watchdog::{self, Watch};
use crate::watched::Watched;
use crate::worker::steps::Step;
use crate::worker::{Worker, WorkerConfig};

/// A running daemon: the frames' worker in this thread, the sockets' worker and control. Both end
/// after the frames' worker, which has an end of their mail.
pub(crate) struct Daemon {
    pub(crate) worker: Worker,
    _watch: Watch,
    _sockets: Option<SocketsThread>,
    _control: Option<ControlThread>,
}

/// Runs the daemon in the calling thread until a signal ends it.
///
/// # Errors
/// Everything that keeps it from starting, found in one go; or one error of the running worker.
pub fn run(config: &Config, source: Source, sandbox: &Sandbox) -> Result<(), Vec<StartError>> {
    let supervisor = sandbox.supervisor.clone().map_err(|e| vec![e])?;
    let (mut daemon, arena) = start(config, source, sandbox, supervisor.clone(), None)?;
    daemon.worker.handle_restart();
    small_store(config, supervisor.as_deref()).iter().for_each(|few| tracing::warn!("{few}"));
    tracing::info!("ready: {}", config.summary());
    supervisor.iter().for_each(|supervisor| supervisor.is_ready());
    daemon.worker.run().map_err(failed)?;
    signals::finish(); // guests hear of the last frames, such as the last heartbeat
    sandbox.broker.detach(0);
    daemon.worker.forget_ended();
    // Nobody translates for connections that the host has accepted: both sides are to hear of it.
    match (daemon.worker.owed() + daemon.worker.translated(), daemon.worker.left()) {
        (0, 0) => {
            // A supervisor may be about to start the next one.
            let left = if supervisor.is_some() { arena.leave() } else { arena.remove() };
            if let Err(e) = left {
                tracing::warn!("the arena cannot be put aside: {e}");
            }
            tracing::info!(
                connections = daemon.worker.recorded(),
                "stopped; all acknowledged bytes were delivered"
            );
        }
        (owed, left) => tracing::warn!(
            owed,
            left,
            "stopped; acknowledged bytes of connections were not delivered: the next start \
             delivers them, or resets the connections"
        ),
    }
    Ok(())
}

/// An error of the running worker.
pub(crate) fn failed(e: io::Error) -> Vec<StartError> {
    vec![error(format!("the event loop failed: {e}"), "report this")]
}

/// Opens everything. A run that settles has an arena which was `left` with this size, and nobody
/// reaches it but by signals.
pub(crate) fn start(
    config: &Config,
    source: Source,
    sandbox: &Sandbox,
    supervisor: Option<Arc<Supervisor>>,
    left: Option<ArenaSize>,
) -> Result<(Daemon, Arc<ArenaFile>), Vec<StartError>> {
    let settings = &config.daemon;
    let signals = signals_as_events().map_err(|e| vec![error(e, "report this")])?;
    let eye = sandbox.eye.lock().unwrap_or_else(PoisonError::into_inner).take();
    let watch = watchdog::watch(Watched::Frames, eye);
    let watches = watchdog::start(supervisor.clone(), signals::look);
    watches.and_then(|()| signals::start()).map_err(|e| vec![error(e, "allow more threads")])?;
    let epoch = epoch().map_err(|e| vec![no_chance(&e)])?;
    let links = watch_links();
    let (mut bridges, ref config) = Bridges::begin(config, links.as_ref().ok());
    let busy_poll = Duration::from_micros(settings.busy_poll_us);
    let worker_config = WorkerConfig { busy_poll, epoch };
    let (engine, arena) = engine(config, left).map_err(|e| vec![e])?;
    let arena = Arc::new(arena);
    let mut worker = Worker::new(&worker_config, engine)
        .map_err(|e| vec![error(format!("no event loop: {e}"), "raise the limit of open files")])?;
    worker.set_supervisor(supervisor.clone());
    let mut problems = Vec::new();
    let mut check = |result: Result<(), StartError>| problems.extend(result.err());
    let sockets = start_sockets(&mut worker, &worker_config, sandbox, settings.rt_priority);
    check(sockets.as_ref().map(drop).map_err(Clone::clone));
    check(links.as_ref().map(drop).map_err(Clone::clone));
    let owners = sandbox.owners.clone();
    // Nobody asks a run that settles.
    let lookers = owners.as_ref().map_or(Ok(OWN), Owners::of_control);
    let operators = left.is_none().then(|| open_control(settings, lookers)).transpose();
    check(operators.as_ref().map(drop).map_err(Clone::clone));
    check(open_booster(&mut worker, config));
    let addresses = links.as_ref().map(LinkWatch::addresses).unwrap_or_default();
    let openings = Openings::new(Arc::clone(&sandbox.broker), addresses);
    let mut interfaces = Interfaces::new(links.ok(), openings.clone());
    check(owners.clone().map(drop)); // without them every VM is our own user's, and nothing starts
    let owners = owners.unwrap_or_default();
    let first = Prepared::first(config, bridges.names(), owners, arena.size);
    let running =
        open_ports(&mut worker, first, &openings, &mut interfaces, &mut bridges, &mut check);
    let means = Means { openings, owners: sandbox.owners.clone(), dirs: sandbox.dirs.clone() };
    let registry = registry(config, sandbox);
    check(registry.as_ref().map(drop).map_err(Clone::clone));
    let endpoints = Endpoints {
        signals: Some(signals),
        supervisor,
        broker: Some(Arc::clone(&sandbox.broker)),
        operators: operators.ok().flatten(),
        metrics: None,
        preparer: left.is_none().then(|| Preparer::new(source, means, Arc::clone(&arena), running)),
        interfaces,
        bridges,
        registry: registry.ok(),
    };
    let control = start_control(&mut worker, endpoints, settings);
    check(control.as_ref().map(drop).map_err(Clone::clone));
    check(place(settings, booster::is_wanted(config)));
    warn(config);
    check(sandbox.close());
    let daemon = Daemon { worker, _watch: watch, _sockets: sockets.ok(), _control: control.ok() };
    if !problems.is_empty() {
        // The memory of a daemon that does not run is nobody's.
        let _ = arena.is_new.then(|| arena.remove());
        sandbox.broker.detach(0); // filters would turn frames to taps that go
        return Err(problems);
    }
    Ok((daemon, arena))
}

fn watch_links() -> Result<LinkWatch, StartError> {
    LinkWatch::new()
        .map_err(|e| error(format!("cannot watch interfaces: {e}"), "allow netlink sockets"))
}

fn warn(config: &Config) {
    let warnings = large_mtus(config).into_iter().chain(uneven_mtus(config));
    warnings.chain(at_strangers(config)).for_each(|warning| tracing::warn!("{warning}"));
}

/// The locations of stations: from etcd, or else from a list.
fn registry(config: &Config, sandbox: &Sandbox) -> Result<Box<dyn Registry>, StartError> {
    let fix = "allow more threads and open files";
    Ok(match sandbox.registry.clone()? {
        None => Box::new(Listed::new(config.stations.clone()).map_err(|e| error(e, fix))?),
        Some(at) => Box::new(Etcd::start(at).map_err(|e| error(e, fix))?),
    })
}

/// Starts the sockets' worker, with the way to guests' sockets on other hosts.
fn start_sockets(
    worker: &mut Worker,
    config: &WorkerConfig,
    sandbox: &Sandbox,
    rt_priority: u8,
) -> Result<SocketsThread, StartError> {
    let doors = sandbox.doors.lock().unwrap_or_else(PoisonError::into_inner).take();
    let started = sockets_mail().and_then(|(frames, mail)| {
        let bell = frames.bell();
        worker.set_sockets(frames)?;
        let (incarnation, busy_poll) = (config.epoch.get(), config.busy_poll);
        Beginning { incarnation, busy_poll, rt_priority, mail, doors }.start(bell)
    });
    started.map_err(|e| error(e, "allow more threads and open files"))
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

/// The engine over its arena, which has the size with which it was `left`, if it was.
fn engine(
    config: &Config,
    left: Option<ArenaSize>,
) -> Result<(Engine<'static>, ArenaFile), StartError> {
    make_parent(&config.daemon.arena)?;
    let size = arena_file::size_for(config.budget_sum(), config.flows_sum());
    let size = left.map_or(size, |left| ArenaSize {
        records: left.records.max(size.records),
        pages: left.pages.max(size.pages),
    });
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

fn signals_as_events() -> nix::Result<SignalFd> {
    let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
    SignalFd::with_flags(&block_signals()?, flags)
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

/// The control socket. Those who only look do not keep the network from its start.
fn open_control(
    settings: &DaemonConfig,
    lookers: Result<Access, StartError>,
) -> Result<ControlServer, StartError> {
    make_parent(&settings.control)?;
    let lookers = lookers.unwrap_or_else(|e| {
        tracing::error!("{e}\n    only root and the daemon's own user may connect until then");
        OWN
    });
    let opened = match ControlServer::new(&settings.control, lookers) {
        Err(e) if e.is_not_given() => {
            tracing::error!("{e}\n    fix: put the daemon's user into daemon.status_group");
            ControlServer::new(&settings.control, OWN)
        }
        opened => opened,
    };
    opened.map_err(|e| error(e, "stop the other daemon, or choose another daemon.control"))
}

fn open_booster(worker: &mut Worker, config: &Config) -> Result<(), StartError> {
    let Some(path) = booster::path(config) else { return Ok(()) };
    booster::open(&path)
        .and_then(|listener| worker.set_booster(listener, config.daemon.rt_priority))
        .map_err(|e| error(format!("{}: {e}", path.display()), "free that path"))
}

/// Why there are no metrics.
pub(crate) fn no_metrics(address: SocketAddr, e: &io::Error) -> StartError {
    let fix = "choose another port with daemon.metrics, or turn it \"off\", and restart";
    error(format!("metrics: cannot listen on {address}: {e}"), fix)
}

/// Starts control's thread, with the metrics too.
fn start_control(
    worker: &mut Worker,
    endpoints: Endpoints,
    settings: &DaemonConfig,
) -> Result<ControlThread, StartError> {
    // Those who watch the network do not take it down.
    let metrics = settings.metrics.and_then(|address| {
        let server = MetricsServer::new(address).inspect_err(|e| {
            tracing::error!("{}\n    there are none until then", no_metrics(address, e));
        });
        server.ok()
    });
    let started = Control::new(Endpoints { metrics, ..endpoints }).and_then(|(control, mail)| {
        let thread = control.start(&mail)?;
        worker.set_mail(mail)?;
        Ok(thread)
    });
    started.map_err(|e| error(e, "allow more threads and open files"))
}

/// Opens all ports, by the steps of the change that the start is; the configuration that runs then.
/// If an uplink, overlay or socket cannot be opened yet, for example because its bridge or address
/// comes later than the daemon or another file has its path, the other ports still work, and it is
/// tried again. A VM whose owner does not exist is nobody else's. Only if all VMs have a problem it
/// is an error.
fn open_ports(
    worker: &mut Worker,
    mut first: Prepared,
    openings: &Openings,
    interfaces: &mut Interfaces,
    bridges: &mut Bridges,
    check: &mut impl FnMut(Result<(), StartError>),
) -> Running {
    let (config, owners) = (Arc::clone(&first.target.config), first.owners.clone());
    let (again, restart) = ("the daemon tries again every second", "a reload tries again");
    let mut of_vms = BTreeMap::new();
    for step in &first.plan.steps {
        match (step, first.resources.open(step, &owners, openings, std::time::Duration::ZERO)) {
            (_, Ok(())) => {}
            (Step::AddVm(vm), Err(Failure::Port(failure)))
                if bridges.give_up(monotonic_now(), &vm.name, &failure.what) => {}
            (_, Err(Failure::Port(failure))) if failure.is_final => check(Err(failure.error)),
            // A VM with a tap may come later.
            (Step::AddVm(vm), Err(failure)) if vm.tap.is_none() => {
                of_vms.insert(vm.name.clone(), (failure.into_error(), again));
            }
            (_, Err(failure)) => tracing::error!("{}\n    {again}", failure.into_error()),
        }
    }
    for (vm, e) in config.vms.iter().filter_map(|vm| Some((vm, owners.problem(vm)?))) {
        let next = "only the daemon's user and root can use its socket so far";
        of_vms.insert(vm.name.clone(), (StartError(format!("vm {}: {e}", vm.name)), next));
    }
    for step in std::mem::take(&mut first.plan.steps) {
        if let Step::AddVm(vm) = &step
            && first.target.by_command.contains(&vm.name)
            && !bridges.has(&vm.name)
        {
            first.target.without(&step);
            continue;
        }
        let opened = first.resources.take(&step, &owners);
        opened.port.iter().for_each(|port| interfaces.add(port));
        let Err(what) = worker.take_step(step.clone(), opened) else { continue };
        first.target.without(&step);
        match step {
            Step::AddVm(vm) => drop(of_vms.insert(vm.name, (error(what, "report this"), restart))),
            _ => check(Err(error(what, "report this"))),
        }
    }
    charges::set_max(first.target.config.charges_max());
    let all_fail = of_vms.len() == config.vms.len();
    for (e, next) in config.vms.iter().filter_map(|vm| of_vms.remove(&vm.name)) {
        match all_fail {
            true => check(Err(e)),
            false => tracing::error!("{e}\n    {next}"),
        }
    }
    first.target
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

/// The supervisor says that it keeps fewer descriptors than there are VMs with a socket.
fn small_store(config: &Config, supervisor: Option<&Supervisor>) -> Option<String> {
    let needed = config.vms.iter().filter(|vm| vm.tap.is_none()).count() * locker::FDS;
    let max = supervisor?.store_max().filter(|&max| (max as usize) < needed)?;
    Some(format!(
        "the VMMs of some VMs have to connect again after a restart: systemd keeps {max} \
         descriptors\n    fix: FileDescriptorStoreMax={needed} or more in the unit"
    ))
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
