//! `[[toe_rule]]`: which connections of guests leave the virtual TOE to guest TCP.

use std::net::SocketAddr;
use std::ops::RangeInclusive;

use ipnet::IpNet;
use nightporter_core::toe::control::Program;
use toml::de::DeValue;

use super::keys::{Keys, quoted, strings};
use super::reader::{Section, shown, string};

/// Rules that there may be: each connect() of a guest looks at all of them.
pub(super) const RULES_MAX: usize = 256;
/// Bytes of a process's name that the kernel keeps (`TASK_COMM_LEN`, less its terminator).
const PROGRAM_BYTES_MAX: usize = 15;

/// `[[toe_rule]]`: the first one that fits decides about a connect() of a guest; if none fits, it
/// goes by TOE. A missing key fits all values.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ToeRule {
    /// Destination addresses. Empty: all.
    pub to: Vec<IpNet>,
    /// Destination ports.
    pub port: Option<RangeInclusive<u16>>,
    /// The name of the program as `ps` shows it, at most 15 bytes.
    pub program: Option<String>,
    /// Not by TOE but by guest TCP.
    pub native: bool,
}

impl ToeRule {
    /// All keys of a `[[toe_rule]]`.
    #[must_use]
    pub fn keys(&self) -> Keys {
        let port = self.port.as_ref().map(|ports| match (ports.start(), ports.end()) {
            (first, last) if first == last => first.to_string(),
            (first, last) => quoted(format!("{first}-{last}")),
        });
        vec![
            ("to", (!self.to.is_empty()).then(|| strings(&self.to))),
            ("port", port),
            ("program", self.program.as_ref().map(quoted)),
            ("use", Some(quoted(if self.native { "native" } else { "toe" }))),
        ]
    }

    /// Whether it is about a connection of this program to there.
    #[must_use]
    pub fn fits(&self, program: Program, to: SocketAddr) -> bool {
        (self.to.is_empty() || self.to.iter().any(|net| net.contains(&to.ip())))
            && self.port.as_ref().is_none_or(|ports| ports.contains(&to.port()))
            && self.program.as_ref().is_none_or(|it| Program::of(it.as_bytes()) == program)
    }
}

pub(super) fn read(mut s: Section<'_, '_>) -> ToeRule {
    let to = s.get("to", "write a list, as in [\"10.0.0.0/8\", \"192.0.2.7\"]", networks);
    let port_fix = "give a TCP port, as in 443, or a range, as in \"8000-8010\"";
    let port = s.get("port", port_fix, port_range);
    let program_fix = "give the name that ps shows, at most 15 bytes, as in \"curl\"";
    let program = s.get("program", program_fix, program);
    let native = s.require("use", "write \"toe\" or \"native\"", native).unwrap_or_default();
    s.finish();
    ToeRule { to: to.unwrap_or_default(), port, program, native }
}

fn networks(v: &DeValue<'_>) -> Result<Vec<IpNet>, String> {
    let list = v.as_array().ok_or_else(|| format!("{} is not a list", shown(v)))?;
    if list.is_empty() {
        return Err("is empty, so it fits no connection".into());
    }
    list.iter().map(|v| network(v.get_ref())).collect()
}

pub(super) fn network(v: &DeValue<'_>) -> Result<IpNet, String> {
    let text = string(v)?;
    let wrong = || format!("{} is not a network", shown(v));
    if let Ok(address) = text.parse() {
        return Ok(IpNet::from(std::net::IpAddr::to_canonical(&address)));
    }
    let net: IpNet = text.parse().map_err(|_| wrong())?;
    match net == net.trunc() {
        true => Ok(net),
        false => Err(format!("{net} has bits beyond its prefix: {} is the network", net.trunc())),
    }
}

pub(super) fn port_range(v: &DeValue<'_>) -> Result<RangeInclusive<u16>, String> {
    let text = v.as_integer().map(|n| n.as_str().to_owned());
    let text = text.or_else(|| v.as_str().map(str::to_owned)).unwrap_or_default();
    let (first, last) = text.split_once('-').unwrap_or((&text, &text));
    match (first.parse(), last.parse()) {
        (Ok(first), Ok(last)) if 0 < first && first <= last => Ok(first..=last),
        _ => Err(format!("{} is neither a port nor a range", shown(v))),
    }
}

fn program(v: &DeValue<'_>) -> Result<String, String> {
    let name = string(v)?;
    match name.len() {
        1..=PROGRAM_BYTES_MAX if !name.contains('\0') => Ok(name),
        n => Err(format!("{} is {n} bytes long, and the kernel keeps 1 to 15", shown(v))),
    }
}

fn native(v: &DeValue<'_>) -> Result<bool, String> {
    match string(v)?.as_str() {
        "native" => Ok(true),
        "toe" => Ok(false),
        _ => Err(format!("{} is neither", shown(v))),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::Config;
    use super::*;

    fn parse(rule: &str) -> Result<ToeRule, String> {
        let text = format!("[[vm]]\nname = \"a\"\n[[toe_rule]]\n{rule}\n");
        let config = Config::parse("np.toml", &text, &BTreeMap::new());
        config.map(|config| config.toe_rules[0].clone()).map_err(|e| e.to_string())
    }

    #[test]
    fn a_rule_fits_what_all_of_its_keys_fit() {
        let fits = |rule: &str, program: &str, to: &str| {
            parse(rule).unwrap().fits(Program::of(program.as_bytes()), to.parse().unwrap())
        };
        assert!(fits("use = \"native\"", "", "10.0.0.2:80"));
        let rule = "to = [\"10.0.0.0/8\", \"fd00::7\"]\nport = \"80-81\"\nprogram = \"curl\"\n\
                    use = \"toe\"";
        for (program, to, expected) in [
            ("curl", "10.255.0.2:80", true),
            ("curl", "[fd00::7]:81", true),
            ("curl", "[fd00::8]:81", false),
            ("curl", "11.0.0.2:80", false),
            ("curl", "10.0.0.2:82", false),
            ("curl", "10.0.0.2:79", false),
            ("curl2", "10.0.0.2:80", false),
            ("", "10.0.0.2:80", false),
        ] {
            assert_eq!(fits(rule, program, to), expected, "{program} {to}");
        }
        // A written rule reads back.
        let rule = parse(rule).unwrap();
        let keys = rule.keys().into_iter().filter_map(|(key, value)| Some((key, value?)));
        let text: Vec<_> = keys.map(|(key, value)| format!("{key} = {value}")).collect();
        assert_eq!(parse(&text.join("\n")), Ok(rule));
        assert_eq!(parse("port = 80\nuse = \"toe\"").unwrap().port, Some(80..=80));
    }

    #[test]
    fn what_is_wrong_with_a_rule_is_said() {
        for (rule, said) in [
            ("", "use: is missing"),
            ("use = \"tcp\"", "\"tcp\" is neither"),
            ("use = \"toe\"\nto = []", "is empty"),
            ("use = \"toe\"\nto = [\"10.0.0.1/8\"]", "10.0.0.0/8 is the network"),
            ("use = \"toe\"\nto = [\"web\"]", "\"web\" is not a network"),
            ("use = \"toe\"\nport = 0", "0 is neither a port nor a range"),
            ("use = \"toe\"\nport = \"9-8\"", "neither a port nor a range"),
            ("use = \"toe\"\nport = 65536", "65536 is neither"),
            ("use = \"toe\"\nprogram = \"a-name-of-sixteen\"", "and the kernel keeps 1 to 15"),
            ("use = \"toe\"\nprograms = \"a\"", "unknown key"),
        ] {
            let error = parse(rule).unwrap_err();
            assert!(error.contains(said) && error.contains("fix: "), "{rule}: {error}");
        }
    }
}
