//! The broker's process.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::exit;

use nightporter_attach::area::Area;
use nightporter_attach::{AttachError, Attached, Filters, Held, Hooks, Request, Way, attach};
use nix::net::if_::if_nametoindex;
use nix::sys::prctl::{set_name, set_pdeathsig};
use nix::sys::signal::Signal;
use nix::sys::socket::{setsockopt, sockopt};
use rustix::io::Errno;
use rustix::net::{getsockname, sockopt as option};

use super::rules::{INTERFACES, Rules, Verdict};
use super::shut;
use super::uplink::{OpenError, join_bridge, open_file};
use super::words::{
    Answer, Channel, Given, JOIN, OPEN, REQUEST, Refusal, TO_ENLARGE, read_attach, read_detach,
};
use crate::config::UplinkConfig;
use crate::limits::{RECEIVE_BYTES, SEND_BYTES};
use crate::random::random;

/// How many taps that were made for commands there may be.
const MADE_MAX: usize = 1024;

/// The broker.
struct Process<'a> {
    rules: Rules,
    daemon: &'a Channel,
    made: Made,
    /// Of all attached taps, once there is one.
    area: Option<Area>,
    /// How programs are put on taps.
    hooks: Result<Hooks, AttachError>,
    /// On kernels without links: those of the attached taps, by their numbers.
    filters: BTreeMap<u32, Filters>,
}

/// Taps that it has made for commands, and their numbers, which no others get.
#[derive(Debug, Default)]
struct Made(BTreeMap<String, u32>);

impl Made {
    /// It may not be there any more.
    fn has(&self, name: &str, index: u32) -> bool {
        self.0.get(name) == Some(&index)
    }

    /// Whether there may be one more. An uplink that no longer exists is forgotten before one that
    /// does.
    fn has_room(&mut self, index_of: impl Fn(&str) -> Option<u32>) -> bool {
        if self.0.len() >= MADE_MAX {
            self.0.retain(|name, index| index_of(name) == Some(*index));
        }
        self.0.len() < MADE_MAX
    }
}

/// Until the daemon ends.
pub(super) fn run(rules: Rules, has_macvtap: bool, daemon: &Channel) -> ! {
    let _ = set_name(c"np-uplinks"); // for `ps`
    // If it has ended already, its end of the channel has.
    let _ = set_pdeathsig(Signal::SIGKILL);
    let hooks = Way::of_this_kernel().and_then(Hooks::by);
    hooks.iter().for_each(take_left);
    let ready = shut(rules.path(), has_macvtap).map(|()| None).map_err(Refusal::from);
    let (made, filters) = (Made::default(), BTreeMap::new());
    let mut process = Process { rules, daemon, made, area: None, hooks, filters };
    if daemon.say(&ready).is_ok() && ready.is_ok() {
        while process.serve().is_ok() {}
    }
    exit(0);
}

/// Taps of VMs have no filters of a daemon that was killed any more.
fn take_left(hooks: &Hooks) {
    let names = std::fs::read_dir(INTERFACES).into_iter().flatten().flatten();
    for name in names.filter_map(|it| it.file_name().into_string().ok()) {
        if is_tap(&name)
            && let Ok(index) = if_nametoindex(name.as_str())
            && let Err(e) = hooks.take_left(index)
        {
            tracing::warn!("{name}: filters of a daemon that was killed may be left: {e}");
        }
    }
}

/// Of a macvtap the directions are swapped, and a real NIC has no VM.
fn is_tap(name: &str) -> bool {
    Path::new(&format!("{INTERFACES}/{name}/tun_flags")).exists()
}

impl Process<'_> {
    /// Answers the next request. Errors: the daemon is gone.
    fn serve(&mut self) -> io::Result<()> {
        let mut request = [0; REQUEST];
        let fds = self.daemon.recv(&mut request)?;
        let answer = self.answer(request, &fds);
        self.daemon.say(&answer)
    }

    fn answer(&mut self, mut request: [u8; REQUEST], fds: &[OwnedFd]) -> Answer {
        if let Some(index) = read_detach(&request) {
            self.detach(index);
            return Ok(None);
        }
        self.rules.look_again();
        if request == TO_ENLARGE {
            return enlarge(&self.rules, fds).map(|()| None).map_err(|e| small_buffers(&e));
        }
        if let Some((tap, slot)) = read_attach(&request) {
            return self.attach(&tap, slot).map(Some);
        }
        let joins = request[0] == JOIN;
        if joins {
            request[0] = OPEN;
        }
        let (uplink, is_new) = match self.rules.judge(&request) {
            Verdict::Refuse(what, fix) => {
                return Err(Refusal { what, fix, ..Refusal::default() });
            }
            Verdict::Open(uplink) => (uplink, false),
            Verdict::Make(uplink) => (uplink, true),
        };
        if joins {
            self.join(&uplink, is_new).map(|()| None)
        } else {
            self.open(&uplink, is_new).map(Some)
        }
    }

    fn open(&mut self, uplink: &UplinkConfig, is_new: bool) -> Result<Given, Refusal> {
        let ifname = uplink.ifname.as_str();
        let number = |name: &str| if_nametoindex(name).ok();
        if is_new && !self.made.has_room(number) {
            let what = format!("commands have made {MADE_MAX} taps that still exist");
            let fix = "remove one, or write the uplink into the file and reload".into();
            return Err(Refusal { what, fix, ..Refusal::default() });
        }
        // Then it is closing: its uplink has gone.
        let is_own = is_new && number(ifname).is_some_and(|index| self.made.has(ifname, index));
        let (file, index) = open_file(uplink, is_new).map_err(|e| {
            let OpenError { what, fix, is_busy, is_final, .. } = e;
            Refusal { what, fix, is_busy: is_busy || is_own, is_final }
        })?;
        if is_new {
            self.made.0.insert(ifname.into(), index);
        }
        Ok(Given { fd: file.into(), more: Vec::new(), index })
    }

    fn attach(&mut self, tap: &str, slot: u8) -> Result<Given, Refusal> {
        let refuse =
            |what: String, fix: &str| Refusal { what, fix: fix.into(), ..Refusal::default() };
        Rules::judge_name(tap).map_err(|(what, fix)| refuse(what, &fix))?;
        let index = if_nametoindex(tap).map_err(|_| {
            let fix = "start the VM; taps of other network namespaces cannot be attached: run a \
                       nightporterd there";
            refuse(format!("there is no interface {tap} in the daemon's network namespace"), fix)
        })?;
        if !is_tap(tap) {
            let fix = "name the tap of a VM (ip -details link show type tun); in a container /sys \
                       has to be of its own network namespace (mount -t sysfs)";
            return Err(refuse(format!("{tap} is not a tap"), fix));
        }
        self.rules.judge_tap(tap).map_err(|(what, fix)| refuse(what, &fix))?;
        let failed = |e: &AttachError| {
            let text = e.to_string();
            let (what, fix) = text.split_once("\n    fix: ").unwrap_or((&text, "report this"));
            let is_final = matches!(e, AttachError::NotAllowed(_));
            Refusal { is_final, ..refuse(format!("{tap}: {what}"), fix) }
        };
        let hooks = self.hooks.as_ref().map_err(failed)?;
        let failed_to = |what| move |e: io::Error| failed(&AttachError::of(what, e));
        if self.area.is_none() {
            let area = Area::new(self.rules.plain_after());
            self.area = Some(area.map_err(failed_to("make a map"))?);
        }
        let Some(area) = &self.area else { return Err(Refusal::default()) };
        let seeds = random().map_err(failed_to("get random numbers"))?;
        let mark = u32::try_from(seeds[0] & u64::from(u32::MAX)).unwrap_or(1).max(1);
        let request = Request { index, slot: usize::from(slot), mark };
        let fd = area.fd().try_clone_to_owned().map_err(failed_to("copy a descriptor"))?;
        let attached = attach(hooks, area, &request).map_err(|e| failed(&e))?;
        let Attached { from_vm, to_net, held, claim } = attached;
        let links = match held {
            Held::Links(links) => links,
            Held::Filters(filters) => {
                self.filters.insert(index, filters);
                Vec::new()
            }
        };
        let more = [from_vm.into_fd(), to_net.into_fd(), claim];
        Ok(Given { fd, more: more.into_iter().chain(links).collect(), index })
    }

    /// Errors say that an interface or its filter has gone already.
    fn detach(&mut self, index: u32) {
        let gone = match index {
            0 => std::mem::take(&mut self.filters).into_values().collect::<Vec<_>>(),
            _ => self.filters.remove(&index).into_iter().collect(),
        };
        gone.iter().for_each(|filters| drop(filters.remove()));
    }

    fn join(&self, uplink: &UplinkConfig, is_new: bool) -> Result<(), Refusal> {
        let refuse = |what: String| Refusal { what, ..Refusal::default() };
        let ifname = uplink.ifname.as_str();
        let index = if_nametoindex(ifname).map_err(|e| refuse(e.to_string()))?;
        if is_new && !self.made.has(ifname, index) {
            return Err(refuse(format!("{ifname} is not a tap of this daemon")));
        }
        join_bridge(uplink, index).map_err(|e| refuse(e.to_string()))
    }
}

/// The first receives, the others send.
fn enlarge(rules: &Rules, sockets: &[OwnedFd]) -> io::Result<()> {
    for (n, socket) in sockets.iter().enumerate() {
        let address = SocketAddr::try_from(getsockname(socket)?)?;
        if !rules.has_overlay(address.ip()) {
            return Err(Errno::ADDRNOTAVAIL.into());
        }
        if n == 0 {
            option::set_socket_recv_buffer_size_force(socket, RECEIVE_BYTES)?;
        } else {
            setsockopt(socket, sockopt::SndBufForce, &SEND_BYTES)?;
        }
    }
    Ok(())
}

/// Without the capability no attempt succeeds: the process has it from its start or never.
fn small_buffers(e: &io::Error) -> Refusal {
    let is_final = e.raw_os_error() == Some(Errno::PERM.raw_os_error());
    let mut what = e.to_string();
    if e.raw_os_error() == Some(Errno::ADDRNOTAVAIL.raw_os_error()) {
        what = "the configuration file has no overlay at this address; reload it".into();
    }
    let fix = format!(
        "give the daemon CAP_NET_ADMIN, or set net.core.rmem_max to {RECEIVE_BYTES} and \
         net.core.wmem_max to {SEND_BYTES}, and restart nightporterd"
    );
    Refusal { what, fix, is_final, ..Refusal::default() }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::net::UdpSocket;

    use super::*;
    use crate::config::{Config, Source};

    #[test]
    fn a_tap_that_is_there_is_not_forgotten_for_another() {
        let mut made = Made((0..1024).map(|n| (format!("np{n}"), n + 10)).collect());
        let number = |name: &str| name[2..].parse().map(|n: u32| n + 10).ok();
        assert!(!made.has_room(number));
        assert!(made.has("np0", 10) && made.has("np1023", 1033) && !made.has("np1", 10));
        // One was removed, and another was made by the name of a second.
        let number = |name: &str| number(name).filter(|n| *n != 17).map(|n| n + u32::from(n == 18));
        assert!(made.has_room(number));
        assert!(!made.has("np7", 17) && !made.has("np8", 18) && made.has("np9", 19));
    }

    #[test]
    fn buffers_grow_of_sockets_with_the_address_of_an_overlay_and_of_no_others() {
        let text = "[[overlay]]\nname = \"o\"\nvni = 7\nlocal = \"127.0.0.1\"\n\
                    peers = [\"127.0.0.2\"]\n";
        let config = Config::parse("np.toml", text, &BTreeMap::new()).unwrap();
        let source = Source { path: "np.toml".into(), overrides: BTreeMap::new() };
        let rules = Rules::new(source, &config);
        let socket = |address: &str| OwnedFd::from(UdpSocket::bind((address, 0)).unwrap());
        let others = [socket("127.0.0.1"), socket("127.0.0.2")];
        let sizes = |sockets: &[OwnedFd]| {
            let [receives, sends] = sockets else { panic!("two of them") };
            let sends = option::socket_send_buffer_size(sends).unwrap();
            (option::socket_recv_buffer_size(receives).unwrap(), sends)
        };
        let own = [socket("127.0.0.1"), socket("127.0.0.1")];
        let before = sizes(&own);
        match enlarge(&rules, &own) {
            // socket(7): they are doubled.
            Ok(()) => assert_eq!(sizes(&own), (2 * RECEIVE_BYTES, 2 * SEND_BYTES)),
            Err(e) => assert_eq!((e.raw_os_error(), sizes(&own)), (Some(1), before), "no root"),
        }
        assert!(enlarge(&rules, &others).is_err());
        assert_eq!(sizes(&others).1, before.1);
    }
}
