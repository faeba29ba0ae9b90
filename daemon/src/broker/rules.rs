//! The broker's rules for a daemon that it does not believe: it does what the configuration file
//! says, which it reads itself.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use nightporter_attach::tap::{FROM_VM, TO_NET};

use super::words::{REQUEST, read, to_open};
use crate::config::{Config, Source, UplinkConfig, UplinkKind};

/// The prefix of the names of taps that commands make. A host's network manager and packet filter
/// match interfaces by name (`en*`), so these match none of their rules unless that is intended.
const NAMES: &str = "np";
/// Where the kernel has a directory for each interface, and in a bridge's one for each port.
pub(super) const INTERFACES: &str = "/sys/class/net";

/// The uplinks that a configuration allows.
#[derive(Debug)]
struct Allowed {
    /// To be opened, as requests.
    uplinks: BTreeSet<[u8; REQUEST]>,
    /// New taps go into these.
    bridges: Vec<String>,
    /// Of overlays of this host.
    addresses: Vec<IpAddr>,
    /// Of VMs of the file, names or patterns.
    taps: Vec<String>,
    /// Of taps that commands may attach.
    patterns: Vec<String>,
    /// All taps of these are attached.
    attach: Vec<String>,
}

impl Allowed {
    fn by(config: &Config) -> Self {
        Self {
            uplinks: config.uplinks.iter().map(to_open).collect(),
            bridges: config.daemon.bridges.clone(),
            addresses: config.overlays.iter().map(|overlay| overlay.local.ip()).collect(),
            taps: config.vms.iter().filter_map(|vm| vm.tap.clone()).collect(),
            patterns: config.daemon.taps.clone(),
            attach: config.attach.iter().map(|it| it.bridge.clone()).collect(),
        }
    }
}

/// The decision about a request.
#[derive(Debug, Eq, PartialEq)]
pub(super) enum Verdict {
    /// It is in the file: it is opened.
    Open(UplinkConfig),
    /// It is in no file: it is made, if there is no interface of that name.
    Make(UplinkConfig),
    /// No: the reason, and the fix.
    Refuse(String, String),
}

/// See the module doc.
#[derive(Debug)]
pub(super) struct Rules {
    source: Source,
    /// Frames of attached taps pass plain when one has waited so long.
    plain_after: Duration,
    at_start: Allowed,
    /// The last file that was good.
    now: Allowed,
}

impl Rules {
    /// `config` is the content of `source` at the start.
    pub(super) fn new(source: Source, config: &Config) -> Self {
        let plain_after = Duration::from_millis(config.daemon.plain_after_ms);
        Self { source, plain_after, at_start: Allowed::by(config), now: Allowed::by(config) }
    }

    /// Frames of attached taps pass plain when one has waited so long.
    pub(super) fn plain_after(&self) -> Duration {
        self.plain_after
    }

    /// The file.
    pub(super) fn path(&self) -> &Path {
        &self.source.path
    }

    /// The file may be in the middle of being written.
    pub(super) fn look_again(&mut self) {
        if let Ok(config) = self.source.load() {
            self.now = Allowed::by(&config);
        }
    }

    /// Whether a VM's tap may have this name. Errors: why not, and the fix.
    pub(super) fn judge_name(tap: &str) -> Result<(), (String, String)> {
        if [FROM_VM, TO_NET].iter().any(|begin| tap.starts_with(begin)) {
            let what = format!("{tap} is called as those taps that a nightporterd makes");
            return Err((what, "name the tap of a VM (virsh domiflist VM)".into()));
        }
        Ok(())
    }

    /// Whether a tap may be attached. Errors: why not, and the fix.
    pub(super) fn judge_tap(&self, tap: &str) -> Result<(), (String, String)> {
        let fits = |pattern: &String| match pattern.strip_suffix('*') {
            Some(begin) => tap.starts_with(begin),
            None => pattern == tap,
        };
        let is_of_file = [&self.at_start, &self.now].iter().any(|it| it.taps.iter().any(fits));
        let is_in =
            |bridge: &String| Path::new(&format!("{INTERFACES}/{bridge}/brif/{tap}")).exists();
        let both = [&self.at_start, &self.now];
        let is_in_bridge = || both.iter().any(|it| it.attach.iter().any(is_in));
        if is_of_file || self.now.patterns.iter().any(fits) || is_in_bridge() {
            return Ok(());
        }
        let file = self.source.path.display();
        let fix = format!(
            "name it in daemon.taps of {file}, as in [\"{tap}\"], or write a [[vm]] with tap = \
             \"{tap}\", or an [[attach]] with its bridge, there and reload"
        );
        Err((format!("{file} does not allow to attach {tap}"), fix))
    }

    /// Whether overlays of this host have that address.
    pub(super) fn has_overlay(&self, address: IpAddr) -> bool {
        [&self.at_start, &self.now].iter().any(|it| it.addresses.contains(&address))
    }

    pub(super) fn judge(&self, request: &[u8; REQUEST]) -> Verdict {
        let Some(uplink) = read(request) else {
            return Verdict::Refuse("this is not an uplink".into(), "report this".into());
        };
        if [&self.at_start, &self.now].iter().any(|it| it.uplinks.contains(request)) {
            return Verdict::Open(uplink);
        }
        let UplinkConfig { ifname, bridge, .. } = &uplink;
        let file = self.source.path.display();
        let write = format!("write the uplink into {file} and reload");
        let can_be_new = uplink.create && uplink.kind == UplinkKind::Tap;
        match bridge {
            Some(_) if can_be_new && !ifname.starts_with(NAMES) => Verdict::Refuse(
                format!("a command may only make taps whose names begin with {NAMES}"),
                format!("choose another ifname than {ifname}, or {write}"),
            ),
            Some(bridge) if can_be_new && self.now.bridges.contains(bridge) => {
                Verdict::Make(uplink)
            }
            Some(bridge) if can_be_new => Verdict::Refuse(
                format!("{bridge} is not among the bridges that commands may use"),
                format!("name it in daemon.bridges, or {write}"),
            ),
            _ => {
                let what = "and a command may only add a new tap with a bridge";
                Verdict::Refuse(format!("{file} has no such uplink {ifname}, {what}"), write)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;

    use super::*;

    const LAN: &str =
        "[[uplink]]\nname = \"lan\"\nkind = \"tap\"\nifname = \"np0\"\nbridge = \"br0\"\n";

    /// The rules of a daemon that started with `text`, and its file.
    fn rules(name: &str, text: &str) -> Rules {
        let path = std::env::temp_dir().join(format!("np-rules-{name}-{}", std::process::id()));
        fs::write(&path, text).unwrap();
        let source = Source { path, overrides: BTreeMap::new() };
        let config = source.load().unwrap();
        Rules::new(source, &config)
    }

    fn uplink(text: &str) -> UplinkConfig {
        let config = Config::parse("np.toml", text, &BTreeMap::new()).unwrap();
        UplinkConfig { name: String::new(), ..config.uplinks[0].clone() }
    }

    fn refused(rules: &Rules, uplink: &UplinkConfig) -> String {
        match rules.judge(&to_open(uplink)) {
            Verdict::Refuse(what, fix) => format!("{what}: {fix}"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_the_file_says_is_opened_and_nothing_that_differs_from_it() {
        let mut rules = rules("file", LAN);
        let lan = uplink(LAN);
        assert_eq!(rules.judge(&to_open(&lan)), Verdict::Open(lan.clone()));
        for other in [
            UplinkConfig { ifname: "eth0".into(), ..lan.clone() },
            UplinkConfig { bridge: Some("br1".into()), ..lan.clone() },
            UplinkConfig { bridge: None, ..lan.clone() },
            UplinkConfig { create: false, ..lan.clone() },
            UplinkConfig { kind: UplinkKind::Macvtap, ..lan.clone() },
        ] {
            let refused = refused(&rules, &other);
            assert!(refused.contains("np-rules-file"), "{refused}");
        }
        // The file changes: its content at the start stays allowed, and its present content counts.
        let wan = LAN.replace("lan", "wan").replace("np0", "np1");
        fs::write(&rules.source.path, &wan).unwrap();
        let wan = uplink(&wan);
        assert!(matches!(rules.judge(&to_open(&wan)), Verdict::Refuse(..)), "not read yet");
        rules.look_again();
        for it in [&lan, &wan] {
            assert_eq!(rules.judge(&to_open(it)), Verdict::Open(it.clone()));
        }
        // It is being written.
        fs::write(&rules.source.path, "[[upl").unwrap();
        rules.look_again();
        assert_eq!(rules.judge(&to_open(&wan)), Verdict::Open(wan));
        fs::remove_file(&rules.source.path).unwrap();
    }

    #[test]
    fn a_command_adds_only_new_taps_to_bridges_that_are_named() {
        let mut rules = rules("command", LAN);
        let other = UplinkConfig { ifname: "np7".into(), ..uplink(LAN) };
        let said = refused(&rules, &other);
        assert!(said.contains("br0 is not among") && said.contains("daemon.bridges"), "{said}");
        fs::write(&rules.source.path, format!("[daemon]\nbridges = [\"br0\"]\n{LAN}")).unwrap();
        rules.look_again();
        assert_eq!(rules.judge(&to_open(&other)), Verdict::Make(other.clone()));
        for name in ["n", "en0", "eth0", "xnp0", "Np0", "vnet7"] {
            let said = refused(&rules, &UplinkConfig { ifname: name.into(), ..other.clone() });
            assert!(said.contains("begin with np") && said.contains(name), "{said}");
        }
        refused(&rules, &UplinkConfig { bridge: None, ..other.clone() });
        refused(&rules, &UplinkConfig { create: false, ..other.clone() });
        refused(&rules, &UplinkConfig { kind: UplinkKind::Macvtap, ..other.clone() });
        refused(&rules, &UplinkConfig { bridge: Some("br1".into()), ..other });
        fs::remove_file(&rules.source.path).unwrap();
    }

    #[test]
    fn taps_of_the_file_and_those_that_it_allows_are_attached_and_no_others() {
        let vm = "[[vm]]\nname = \"a\"\ntap = \"tap7\"\n[[vm]]\nname = \"b\"\ntap = \"run*\"\n\
                  mac = \"52:54:00:00:00:01\"\n";
        let mut rules = rules("taps", vm);
        let may = |rules: &Rules, tap: &str| rules.judge_tap(tap).is_ok();
        assert!(may(&rules, "tap7") && may(&rules, "run5") && !may(&rules, "vnet0"));
        let (what, fix) = rules.judge_tap("vnet0").unwrap_err();
        assert!(what.contains("np-rules-taps") && fix.contains("daemon.taps"), "{what}: {fix}");
        let text = "[daemon]\ntaps = [\"vnet*\", \"tap1\"]\n";
        fs::write(&rules.source.path, text).unwrap();
        rules.look_again();
        for (tap, is_allowed) in
            [("vnet0", true), ("vnet12", true), ("tap1", true), ("tap7", true), ("tap12", false)]
        {
            assert_eq!(may(&rules, tap), is_allowed, "{tap}");
        }
        fs::remove_file(&rules.source.path).unwrap();
    }

    #[test]
    fn an_address_is_that_of_an_overlay_of_the_file_or_nobodys() {
        let text = "[[overlay]]\nname = \"o\"\nvni = 7\nlocal = \"192.0.2.1\"\n\
                    peers = [\"192.0.2.2\"]\n";
        let rules = rules("overlay", text);
        let has = |address: [u8; 4]| rules.has_overlay(IpAddr::from(address));
        assert!(has([192, 0, 2, 1]) && !has([192, 0, 2, 2]) && !has([0, 0, 0, 0]));
        fs::remove_file(&rules.source.path).unwrap();
    }
}
