//! `[[overlay]]`: an Ethernet over many hosts.

use std::net::{IpAddr, SocketAddr};

use nightporter_core::overlay::{SOURCE_PORTS, overhead};
use nightporter_core::wire::vxlan;
use toml::de::DeValue;

use super::keys::{Keys, plain, quoted};
use super::parse::{Unique, network, port_name};
use super::reader::{Section, integer, shown, string};
use super::table::Shown as _;

/// The smallest inner MTU: IPv6 requires it of every link (RFC 8200 section 5).
pub const MTU_MIN: u16 = 1280;
/// The largest: a jumbo frame's, as of taps.
pub const MTU_MAX: u16 = 9216;
/// Most hosts of an overlay besides this one: each frame for everybody is sent to each of them.
pub const PEERS_MAX: usize = 64;
/// The MTU of an Ethernet between the hosts, unless configured otherwise.
const ETHERNET_MTU: u16 = 1500;

/// `[[overlay]]`: a port to the other hosts of a network, by VXLAN.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct OverlayConfig {
    /// Unique name of the port, in metrics and in the CLI.
    pub name: String,
    /// The network that the port belongs to, of which it is the only overlay. Default: the one that
    /// has no name.
    pub network: Option<String>,
    /// The VXLAN network identifier, the same on all hosts: 1 to 16777215.
    pub vni: u32,
    /// This host's own address, and the UDP port that all hosts listen at: `"192.0.2.1"` or
    /// `"192.0.2.1:4789"`, `"2001:db8::1"` or `"[2001:db8::1]:4789"`. Default port 4789. Peers know
    /// this host by the address. Overlays may have the same.
    pub local: SocketAddr,
    /// The other hosts, written as `local`: 1 to 64 of the same family. Frames are accepted from
    /// their addresses only. With a registry, which has hosts too, none needs to be listed; there
    /// are 64 peers at most then as well, first those of the list.
    pub peers: Vec<SocketAddr>,
    /// Largest IP packet inside, in bytes. Default 1450, over IPv6 1430, which an Ethernet between
    /// the hosts leaves (MTU 1500 minus the tunnel's 50 or 70 bytes). 1280 to 9216. Give VMs no
    /// larger `mtu`: longer TCP segments are cut, other long packets are lost, and the sender of
    /// one to a known VM is told.
    pub mtu: u16,
}

impl OverlayConfig {
    /// All keys of an `[[overlay]]`.
    #[must_use]
    pub fn keys(&self) -> Keys {
        vec![
            ("name", Some(quoted(&self.name))),
            ("network", self.network.as_ref().map(quoted)),
            ("vni", plain(self.vni)),
            ("local", Some(quoted(self.local))),
            ("peers", self.peers.shown()),
            ("mtu", plain(self.mtu)),
        ]
    }
}

pub(super) fn read(
    mut s: Section<'_, '_>,
    has_registry: bool,
    unique: &mut Unique,
) -> OverlayConfig {
    let name = port_name(&mut s, unique);
    let network = network(&mut s);
    // Frames from one host must not go to another.
    unique.add("network", network.clone().unwrap_or_default(), &s);
    let vni_fix = "give the network's number, 1 to 16777215, the same on all hosts";
    let vni = s.require("vni", vni_fix, integer(1..=vxlan::VNI_MAX.into()));
    if let Some(vni) = vni {
        unique.add("vni", u32::to_string(&vni), &s);
    }
    let local_fix = "give this host's address, as in \"192.0.2.1\" or \"192.0.2.1:4789\"";
    let local = s.require("local", local_fix, host);
    let peers_fix = "list the other hosts, as in [\"192.0.2.2\", \"192.0.2.3\"]";
    let peers = match has_registry {
        true => s.get("peers", peers_fix, peers),
        false => s.require("peers", peers_fix, peers),
    };
    let peers = peers.unwrap_or_default();
    let mtu_fix = "leave it out, or give the path's MTU less 50 bytes, over IPv6 less 70";
    let mtu = s.get("mtu", mtu_fix, integer(MTU_MIN.into()..=MTU_MAX.into()));
    if let Some(local) = local {
        // Another overlay of this host would send from it.
        if sends(local) {
            let what = format!("{} is a port that overlays send from", local.port());
            s.problem("local", what, "use 4789, or another port below 49152");
        }
        let other = peers.iter().find(|peer| peer.is_ipv4() != local.is_ipv4());
        if let Some(peer) = other {
            let what = format!("{peer} and local {local} are of two families");
            s.problem("peers", what, "use IPv4 between all hosts, or IPv6");
        }
        if peers.iter().any(|peer| peer.ip() == local.ip()) {
            let what = format!("{} is this host itself", local.ip());
            s.problem("peers", what, "list only the other hosts");
        }
    }
    s.finish();
    let local = local.unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], vxlan::PORT)));
    OverlayConfig {
        name,
        network,
        vni: vni.unwrap_or(1),
        mtu: mtu.unwrap_or(ETHERNET_MTU - overhead(local.ip())),
        local,
        peers,
    }
}

pub(super) fn host(v: &DeValue<'_>) -> Result<SocketAddr, String> {
    let text = string(v)?;
    let with_port = |ip: IpAddr| SocketAddr::new(ip, vxlan::PORT);
    let host = text.parse::<IpAddr>().map(with_port).or_else(|_| text.parse());
    let host: SocketAddr = host.map_err(|_| format!("{} is not an address", shown(v)))?;
    if is_link_local(host.ip()) {
        return Err(format!("{} is link-local: use an address of the whole network", host.ip()));
    }
    if is_host(host) { Ok(host) } else { Err(format!("{host} is not a host")) }
}

/// The interface that it is on would have to be named, and is not in a datagram's address.
fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

fn is_host(host: SocketAddr) -> bool {
    let is_one = match host.ip() {
        IpAddr::V4(ip) => !ip.is_unspecified() && !ip.is_multicast() && !ip.is_broadcast(),
        IpAddr::V6(ip) => !ip.is_unspecified() && !ip.is_multicast(),
    };
    is_one && host.port() > 0
}

/// Overlays send from there, and listen elsewhere.
fn sends(host: SocketAddr) -> bool {
    SOURCE_PORTS.contains(&host.port())
}

/// Whether the overlay at `local` may send frames to a host of a registry: it must meet the rules
/// for `peers`, and not be a program on this host.
#[must_use]
pub(crate) fn may_be_peer(local: SocketAddr, host: SocketAddr) -> bool {
    let (ip, own) = (host.ip().to_canonical(), local.ip());
    is_host(SocketAddr::new(ip, host.port()))
        && !is_link_local(ip)
        && !sends(host)
        && ip == host.ip()
        && ip != own
        && ip.is_ipv4() == own.is_ipv4()
        && (!ip.is_loopback() || own.is_loopback())
}

fn peers(v: &DeValue<'_>) -> Result<Vec<SocketAddr>, String> {
    let list = v.as_array().ok_or_else(|| format!("{} is not a list", shown(v)))?;
    if list.is_empty() || list.len() > PEERS_MAX {
        return Err(format!("has {} hosts, and may have 1 to {PEERS_MAX}", list.len()));
    }
    let peers = list.iter().map(|v| host(v.get_ref())).collect::<Result<Vec<_>, String>>()?;
    for (n, peer) in peers.iter().enumerate() {
        if peers[..n].iter().any(|other| other.ip() == peer.ip()) {
            return Err(format!("has {} twice", peer.ip()));
        }
    }
    Ok(peers)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::Config;
    use super::*;

    fn parse(overlay: &str) -> Result<OverlayConfig, String> {
        let text = format!("[[overlay]]\nname = \"o\"\n{overlay}\n");
        let config = Config::parse("np.toml", &text, &BTreeMap::new());
        config.map(|config| config.overlays[0].clone()).map_err(|e| e.to_string())
    }

    #[test]
    fn an_overlay_needs_little() {
        let o = parse("vni = 7\nlocal = \"192.0.2.1\"\npeers = [\"192.0.2.2:8472\"]").unwrap();
        assert_eq!((o.vni, o.mtu), (7, 1450));
        assert_eq!(o.local, "192.0.2.1:4789".parse().unwrap());
        assert_eq!(o.peers, ["192.0.2.2:8472".parse().unwrap()]);
        let o = parse("vni = 7\nlocal = \"fd00::1\"\npeers = [\"fd00::2\"]").unwrap();
        assert_eq!((o.mtu, o.peers[0].to_string().as_str()), (1430, "[fd00::2]:4789"));
    }

    #[test]
    fn what_is_wrong_is_said_with_its_line_and_what_to_do() {
        let good = "vni = 7\nlocal = \"192.0.2.1\"\npeers = [\"192.0.2.2\"]";
        for (was, is, said) in [
            ("vni = 7", "vni = 0", "overlay.o.vni"),
            ("vni = 7", "vni = 16777216", "overlay.o.vni"),
            ("\"192.0.2.1\"", "\"0.0.0.0\"", "0.0.0.0:4789 is not a host"),
            ("\"192.0.2.1\"", "\"eth0\"", "\"eth0\" is not an address"),
            ("\"192.0.2.1\"", "\"192.0.2.1:0\"", "192.0.2.1:0 is not a host"),
            ("\"192.0.2.1\"", "\"192.0.2.1:49152\"", "49152 is a port that overlays send from"),
            ("\"192.0.2.1\"", "\"fe80::1\"", "fe80::1 is link-local"),
            ("[\"192.0.2.2\"]", "[\"[fe80::2%3]:1\"]", "fe80::2 is link-local"),
            ("[\"192.0.2.2\"]", "[]", "has 0 hosts, and may have 1 to 64"),
            ("[\"192.0.2.2\"]", "\"192.0.2.2\"", "is not a list"),
            ("[\"192.0.2.2\"]", "[\"192.0.2.2\", \"192.0.2.2:1\"]", "has 192.0.2.2 twice"),
            ("[\"192.0.2.2\"]", "[\"192.0.2.1\"]", "192.0.2.1 is this host itself"),
            ("[\"192.0.2.2\"]", "[\"fd00::2\"]", "[fd00::2]:4789 and local 192.0.2.1:4789 are"),
            ("vni = 7", "vni = 7\nmtu = 1279", "overlay.o.mtu"),
            ("vni = 7\n", "", "overlay.o.vni: is missing"),
        ] {
            let error = parse(&good.replace(was, is)).unwrap_err();
            assert!(error.contains(said) && error.contains("fix: "), "{error}");
        }
    }

    #[test]
    fn a_network_has_one_overlay() {
        let one = |n: u8, network: &str| {
            format!(
                "[[overlay]]\nname = \"o{n}\"\nvni = {n}\nlocal = \"192.0.2.1:{n}\"\n\
                 peers = [\"192.0.2.2\"]\n{network}\n"
            )
        };
        let both = |network: &str| {
            let text = one(1, network) + &one(2, "network = \"red\"");
            Config::parse("np.toml", &text, &BTreeMap::new())
        };
        assert!(both("").is_ok());
        let error = both("network = \"red\"").unwrap_err().to_string();
        assert!(error.contains("overlay.o2.network: \"red\" is already used"), "{error}");
    }

    #[test]
    fn a_host_of_a_registry_is_what_a_configured_one_is() {
        let may =
            |local: &str, host: &str| may_be_peer(local.parse().unwrap(), host.parse().unwrap());
        let (v4, v6) = ("192.0.2.1:4789", "[fd00::1]:4789");
        assert!(may(v4, "192.0.2.2:4789") && may(v4, "192.0.2.2:8472") && may(v6, "[fd00::2]:1"));
        assert!(may("127.0.0.1:4789", "127.0.0.2:4789"), "all of it is on one host");
        for bad in ["127.0.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255", "192.0.2.1"] {
            assert!(!may(v4, &format!("{bad}:4789")), "{bad}");
        }
        for bad in ["::1", "::", "ff02::1", "fe80::2", "fd00::1", "::ffff:192.0.2.2"] {
            assert!(!may(v6, &format!("[{bad}]:4789")), "{bad}");
        }
        for bad in ["192.0.2.2:0", "192.0.2.2:49152", "[fd00::2]:4789", "[::ffff:c000:202]:4789"] {
            assert!(!may(v4, bad), "{bad}");
        }
    }

    #[test]
    fn what_may_wait_for_overlays_of_one_port_is_memory() {
        let one = |n: u8, port: u16| {
            format!(
                "[[overlay]]\nname = \"o{n}\"\nvni = {n}\nlocal = \"192.0.2.1:{port}\"\n\
                 peers = [\"192.0.2.2\"]\nnetwork = \"n{n}\"\n"
            )
        };
        let memory = |ports: [u16; 3]| {
            let text: String = (1..).zip(ports).map(|(n, port)| one(n, port)).collect();
            Config::parse("np.toml", &text, &BTreeMap::new()).unwrap().memory_max()
        };
        assert_eq!(memory([1, 1, 2]) - memory([1, 2, 3]), 16 << 20);
    }

    #[test]
    fn its_keys_say_the_same() {
        let o = parse("vni = 7\nlocal = \"fd00::1\"\npeers = [\"fd00::2\", \"fd00::3\"]").unwrap();
        let lines = o.keys().into_iter().skip(1);
        let text: Vec<_> = lines.filter_map(|(key, v)| Some(format!("{key} = {}", v?))).collect();
        assert_eq!(parse(&text.join("\n")), Ok(o));
    }
}
