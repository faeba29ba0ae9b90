//! The sandbox: it leaves little to an intruder who has taken the daemon over. The daemon gives
//! away the rights that it does not need, in two steps.
//!
//! [`enter`] runs before the first thread, so that it holds for all of them. It drops capabilities
//! (`privileges`), and restricts the places of files (`files`). [`Sandbox::close`] runs when
//! everything has started, and restricts the system calls (`calls`). There is no way back and no
//! switch: tests, benches and operators all run the same.
//!
//! A running daemon still has to read its configuration and make sockets of new VMs; this decides
//! which rights remain. Work that needs more was given to a process of its own before
//! ([`crate::broker`]).

pub(crate) mod calls;
pub(crate) mod files;
pub(crate) mod privileges;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use landlock::AccessNet;
use nightporter_registry::etcd;
use nix::sys::prctl::set_dumpable;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::broker::Broker;
use crate::broker::connector::Connector;
use crate::broker::dialer::Dialer;
use crate::charges;
use crate::config::proof::proof_of;
use crate::config::{Config, RegistryConfig, Source, ToeConfig};
use crate::errors::{StartError, error};
use crate::owners::Owners;
use crate::sleeps::Eye;
use crate::sockets::{Doors, ProofDoors, UcxWorker, listen_at};
use crate::start::registry_of;
use crate::supervisor::Supervisor;
use crate::sys;
use crate::tap_address;

/// The things that were opened and read before the doors were shut, and how well they shut.
#[derive(Clone, Debug)]
pub struct Sandbox {
    /// The users who may connect to the VMs' sockets. Users and groups cannot be looked up any
    /// more.
    pub(crate) owners: Result<Owners, StartError>,
    /// The supervisor that started us. Its address may be a name without a file, which Landlock
    /// blocks.
    pub(crate) supervisor: Result<Option<Arc<Supervisor>>, StartError>,
    /// The process that opens uplinks.
    pub broker: Arc<Broker>,
    /// The registry's addresses, with the content of files.
    pub(crate) registry: Result<Option<etcd::Config>, StartError>,
    /// The way to guests' sockets on other hosts, until the worker has it.
    pub(crate) doors: Arc<Mutex<Option<Doors>>>,
    /// The kernel's view of the thread that is going to be the worker, until it is one.
    pub(crate) eye: Arc<Mutex<Option<Eye>>>,
    /// Where sockets can be made.
    pub(crate) dirs: Vec<PathBuf>,
    /// UCX makes connections of its own.
    has_ucx: bool,
    /// The restriction that the kernel could not enforce.
    weak: Option<&'static str>,
}

/// Gives away what only the start of a process needs, to the broker what that is for. `config` is
/// what `source` has, which is read again by a reload. To be called while there is one thread.
///
/// # Errors
/// What the system refuses.
pub fn enter(config: &Config, source: &Source) -> Result<Sandbox, StartError> {
    raise_file_limit();
    // A core dump would contain guests' data.
    let _ = set_dumpable(false);
    sys::let_children_go().map_err(|e| error(e, "report this"))?;
    tap_address::know_host(&source.path); // for the broker, too
    // Before the others, so that it has nothing of that one's; and all before there are secrets.
    let addresses = |it: &RegistryConfig| it.etcd.iter().map(|it| it.address).collect::<Vec<_>>();
    let connector = config.registry.as_ref().map(|it| Connector::start(&addresses(it)));
    let mut connector = connector.transpose()?;
    let toe = config.toe.as_ref();
    let dialer = toe.map(|toe| Dialer::start(toe.dialed_port(), &mut connector)).transpose()?;
    let broker = Arc::new(Broker::start(source, config)?);
    let doors = toe.zip(dialer).map(|(toe, dialer)| doors_of(config, toe, dialer)).transpose()?;
    let owners = Owners::of(config);
    let supervisor = Supervisor::from_env()
        .map(|it| it.map(Arc::new))
        .map_err(|e| error(format!("NOTIFY_SOCKET: {e}"), "unset it, or let systemd set it"));
    charges::memory_is_limited(); // it remembers
    charges::open();
    let eye = Eye::open().map_err(|e| error(format!("/proc: {e}"), "mount it"))?;
    let registry = config.registry.as_ref().zip(connector);
    let registry = registry.map(|(it, connector)| registry_of(it, connector)).transpose();
    let dirs = files::dirs_of(config);
    privileges::reduce(config)?;
    let listens = config.daemon.metrics.map(|metrics| (metrics.port(), AccessNet::BindTcp));
    let places = files::of_daemon(&source.path, config, &dirs);
    let has_ucx = config.toe.as_ref().is_some_and(ToeConfig::has_ucx);
    let weak = files::restrict(places, (!has_ucx).then_some(listens.as_slice()))?;
    // Behind that: UCX has a thread of its own, which must have no more rights than others.
    let ucx = has_ucx.then(UcxWorker::new).transpose().map_err(|e| {
        let fix = "say by UCX_TLS and UCX_NET_DEVICES what it may use (docs/virtual-toe.md)";
        error(format!("toe.fabric: UCX does not start: {e}"), fix)
    })?;
    let doors = Arc::new(Mutex::new(doors.map(|doors| Doors { ucx, ..doors })));
    let eye = Arc::new(Mutex::new(Some(eye)));
    Ok(Sandbox { owners, supervisor, broker, registry, doors, eye, dirs, has_ucx, weak })
}

/// A VM takes about ten descriptors, and the usual soft limit is 1024. The kernel compares a
/// sender's with the descriptors in flight of all its user's processes, so the broker needs it too.
fn raise_file_limit() {
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        // With the old soft limit, opening one descriptor too many reports it.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
}

/// The way to guests' sockets on other hosts, at the address of each overlay.
fn doors_of(config: &Config, toe: &ToeConfig, dialer: Dialer) -> Result<Doors, StartError> {
    let addresses: BTreeSet<_> = config.overlays.iter().map(|it| it.local.ip()).collect();
    let open = |port| {
        let listeners = addresses.iter().map(|address| {
            let at = SocketAddr::new(*address, port);
            let fix = "choose another port with toe.port, on all hosts";
            let socket = listen_at(at);
            let socket =
                socket.map_err(|e| error(format!("toe: cannot listen at {at}: {e}"), fix))?;
            Ok((*address, socket))
        });
        listeners.collect::<Result<Vec<_>, StartError>>()
    };
    let listeners = open(toe.port)?;
    let (dialer, proof) = match proof_of(config)? {
        None => (Some(dialer), None),
        Some(files) => {
            let listeners = open(toe.dialed_port())?;
            (None, Some(ProofDoors { listeners, dialer, files }))
        }
    };
    Ok(Doors { listeners, dialer, proof, ucx: None })
}

impl Sandbox {
    /// Gives away what only the start of the daemon needs, for all threads that there are and will
    /// be.
    ///
    /// # Errors
    /// What the system refuses.
    pub fn close(&self) -> Result<(), StartError> {
        if let Some(weak) = self.weak {
            tracing::warn!("{weak}");
        }
        // With none nothing starts.
        calls::restrict(self.owners.iter().flat_map(Owners::all), self.has_ucx)
    }
}
