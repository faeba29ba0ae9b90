//! From a configuration to a port: its device, its policy, and the interface or sockets of this
//! host that it needs.

use std::collections::BTreeMap;
use std::fmt;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use nightporter_attach::area::{Area, SLOTS, View};
use nightporter_core::port::{GuestConfig, Vlans};
use nix::net::if_::if_nametoindex;

use super::attached::{AttachedPort, Parts, Slot, Slots};
use super::overlay::{OverlayPort, OverlaySockets};
use super::shared::Sockets;
use super::tap::TapPort;
use super::vhost_user::VhostUserConfig;
use super::{Port, Wanted};
use crate::broker::Broker;
use crate::config::VmConfig;
use crate::errors::{StartError, error};
use crate::random::{no_chance, random};
use crate::vhost::listener::Access;

/// Why a port could not be opened.
#[derive(Clone, Debug)]
pub(crate) struct OpenFailure {
    /// For status.
    pub(crate) what: String,
    /// The same, with its fix.
    pub(crate) error: StartError,
    /// Only a restart helps.
    pub(crate) is_final: bool,
    /// Its interface is in use.
    pub(crate) is_busy: bool,
}

/// The names and Ethernet addresses of interfaces, by their numbers.
type ByNumber = BTreeMap<u32, (String, [u8; 6])>;

/// Those of this host's interfaces.
#[derive(Clone, Debug, Default)]
pub(crate) struct Addresses(Arc<Mutex<ByNumber>>);

impl Addresses {
    fn all(&self) -> MutexGuard<'_, ByNumber> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn note(&self, index: u32, name: &str, address: [u8; 6]) {
        self.all().insert(index, (name.to_owned(), address));
    }

    pub(crate) fn forget(&self, index: u32) {
        self.all().remove(&index);
    }

    pub(crate) fn clear(&self) {
        self.all().clear();
    }

    /// The name of the VM's tap. Errors: no interface with such a name has this address.
    fn tap_of(&self, vm: &VmConfig) -> Result<String, [u8; 6]> {
        let tap = vm.tap.as_deref().unwrap_or_default();
        let Some((begin, mac)) = vm.tap_begins().zip(vm.mac) else { return Ok(tap.to_owned()) };
        let wanted = [0xfe, mac[1], mac[2], mac[3], mac[4], mac[5]];
        let all = self.all();
        let mut fits = all.values().filter(|(name, it)| name.starts_with(begin) && *it == wanted);
        fits.next().map(|(name, _)| name.clone()).ok_or(wanted)
    }
}

/// Opens the ports that need the broker.
#[derive(Clone, Debug)]
pub(crate) struct Openings {
    pub(crate) broker: Arc<Broker>,
    /// The sockets that overlays opened here share.
    sockets: Sockets,
    /// Of interfaces, for taps whose names change.
    addresses: Addresses,
    /// Slots of the area of attached taps, and the area, once there is one.
    slots: Slots,
    area: Arc<OnceLock<View>>,
}

impl Openings {
    pub(crate) fn new(broker: Arc<Broker>, addresses: Addresses) -> Self {
        let (sockets, slots) = (Sockets::default(), Slots::default());
        Self { broker, sockets, addresses, slots, area: Arc::default() }
    }

    /// The sockets of an overlay get the buffers that they want: see [`Broker::enlarge`].
    pub(crate) fn enlarge(&self, port: &str, sockets: &OverlaySockets, again: bool) -> bool {
        self.broker.enlarge(port, &sockets.fds().collect::<Vec<_>>(), again)
    }

    /// Opens the interface or sockets of this host that a port needs, and waits for them. Errors:
    /// see [`Broker::open`] and [`OverlayPort::open`].
    pub(crate) fn open(&self, wanted: &Wanted) -> Result<Port, OpenFailure> {
        let failure = |what: &str, error: &dyn fmt::Display, is_final| OpenFailure {
            what: what.to_owned(),
            error: StartError(error.to_string()),
            is_final,
            is_busy: false,
        };
        match wanted {
            Wanted::Uplink(config) => {
                let opened = self.broker.open(config);
                let opened = opened.map(|(file, index)| TapPort::of(file, index, config));
                opened.map(Port::Uplink).map_err(|e| OpenFailure {
                    is_busy: e.is_busy,
                    ..failure(e.what(), &e, e.is_final)
                })
            }
            Wanted::Attached(vm) => self.attach(vm),
            Wanted::Overlay(config) => {
                let seeds = random().map_err(|e| failure("getrandom", &no_chance(&e), true))?;
                let opened = OverlayPort::open(config, seeds, &self.sockets);
                let mut port = opened.map_err(|e| failure(e.what(), &e, e.is_final))?;
                port.has_small_buffers = self.enlarge(&config.name, &port.sockets(), false);
                Ok(Port::Overlay(Box::new(port)))
            }
        }
    }
}

impl Openings {
    fn attach(&self, vm: &VmConfig) -> Result<Port, OpenFailure> {
        let failure = |what: &str, error: StartError, is_final| OpenFailure {
            what: what.to_owned(),
            error,
            is_final,
            is_busy: false,
        };
        let tap = self.addresses.tap_of(vm).map_err(|address| {
            let address = address.map(|byte| format!("{byte:02x}")).join(":");
            let pattern = vm.tap.as_deref().unwrap_or_default();
            let what = format!("no interface {pattern} has the address {address}");
            let fix = "start the VM, or give the name of its tap";
            failure(&what, error(format!("vm {}: {what}", vm.name), fix), false)
        })?;
        let slot = self.slots.take().ok_or_else(|| {
            let what = format!("{SLOTS} taps are attached, which is the most");
            failure(&what, error(&what, "run a second daemon for the others"), false)
        })?;
        let claim = |index| {
            let what = format!("{tap} is attached already, for another VM");
            let error = || error(format!("vm {}: {what}", vm.name), "remove that one first");
            slot.claim(index).then_some(()).ok_or_else(|| failure(&what, error(), false))
        };
        if_nametoindex(tap.as_str()).map_or(Ok(()), claim)?; // before it is linked
        let attached = self.broker.attach(&vm.name, &tap, slot.number());
        let (index, area, fds) = attached.map_err(|e| OpenFailure {
            is_busy: e.is_busy,
            // Another VM may be served; this one waits.
            ..failure(e.what(), StartError(e.to_string()), false)
        })?;
        // Another one may have the name by now.
        let parts = claim(index).and_then(|()| self.parts(index, slot, area, fds));
        let parts = parts.inspect_err(|_| self.broker.detach(index))?;
        Ok(Port::Attached(Box::new(AttachedPort::new(vm, &tap, parts))))
    }

    /// The parts of a tap that the broker has attached, from its answer.
    fn parts(
        &self,
        index: u32,
        slot: Slot,
        area: OwnedFd,
        fds: Vec<OwnedFd>,
    ) -> Result<Parts, OpenFailure> {
        let broken = |what: &str| OpenFailure {
            what: what.to_owned(),
            error: error(what, "report this"),
            is_final: true,
            is_busy: false,
        };
        let view = match self.area.get() {
            Some(view) => *view,
            None => {
                let view = Area::from_fd(area).view();
                let view = view.map_err(|e| broken(&format!("cannot map the area: {e}")))?;
                *self.area.get_or_init(|| view)
            }
        };
        let mut fds = fds.into_iter();
        let (Some(from_vm), Some(to_net), Some(claim)) = (fds.next(), fds.next(), fds.next())
        else {
            return Err(broken("the broker's answer lacks taps"));
        };
        Ok(Parts { index, from_vm, to_net, claim, links: fds.collect(), view, slot })
    }
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
