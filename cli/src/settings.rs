//! The commands that change a setting of a VM at once: the VM first, then what it gets. Until 0.1
//! the VM came last; that order is still understood, where it cannot be mistaken.

use anyhow::{Result, bail};
use clap::Args;
use nightporter_api::{Direction, RATE_LIMIT_MBIT_S_MAX, Request};

use super::names;

/// A VM, and whether something of it is on.
#[derive(Debug, Args)]
pub(crate) struct Switch {
    /// The VM.
    #[arg(add = names::vms())]
    vm: String,
    /// on or off.
    #[arg(value_name = "on|off")]
    switch: String,
}

impl Switch {
    /// The VM, and on.
    ///
    /// # Errors
    /// There is no on or off.
    pub(crate) fn read(&self) -> Result<(String, bool)> {
        let is_on = |word: &str| match word {
            "on" => Some(true),
            "off" => Some(false),
            _ => None,
        };
        let (vm, switch) = (&self.vm, &self.switch);
        match (is_on(switch), is_on(vm)) {
            (Some(on), _) => Ok((vm.clone(), on)),
            (None, Some(on)) => Ok((switch.clone(), on)),
            (None, None) => bail!("{switch} is neither on nor off\n    fix: write {vm} on"),
        }
    }
}

/// A VM, a direction, and a limit.
#[derive(Debug, Args)]
pub(crate) struct RateLimit {
    /// The VM.
    #[arg(add = names::vms())]
    vm: String,
    /// The direction to limit.
    #[arg(value_name = "from-guest|to-guest")]
    direction: String,
    /// Mbit/s (10^6 bits), 1 to 100000; or off.
    #[arg(value_name = "MBIT_S|off")]
    limit: String,
}

impl RateLimit {
    /// The request.
    ///
    /// # Errors
    /// There is no direction, or no limit.
    pub(crate) fn read(&self) -> Result<Request> {
        let [first, second, third] = [&self.vm, &self.direction, &self.limit].map(String::as_str);
        let is_former = direction(second).is_none() && direction(first).is_some();
        let [vm, way, limit] =
            if is_former { [third, first, second] } else { [first, second, third] };
        let Some(direction) = direction(way) else {
            bail!("{way} is no direction\n    fix: write {vm} from-guest {limit}, or to-guest")
        };
        let rate = limit.parse().ok().filter(|rate| (1..=RATE_LIMIT_MBIT_S_MAX).contains(rate));
        if rate.is_none() && limit != "off" {
            bail!(
                "{limit} is no limit\n    fix: write Mbit/s, 1 to {RATE_LIMIT_MBIT_S_MAX}, or off"
            )
        }
        Ok(Request::RateLimit { vm: vm.into(), direction, mbit_s: rate })
    }
}

fn direction(word: &str) -> Option<Direction> {
    match word {
        "from-guest" => Some(Direction::FromGuest),
        "to-guest" => Some(Direction::ToGuest),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_vm_comes_first_and_may_come_last_as_it_did() {
        let read = |vm: &str, switch: &str| {
            Switch { vm: vm.into(), switch: switch.into() }.read().map_err(|e| e.to_string())
        };
        let web1 = |on| Ok(("web1".to_owned(), on));
        assert_eq!(read("web1", "on"), web1(true));
        assert_eq!(read("off", "web1"), web1(false));
        assert_eq!(read("on", "off"), Ok(("on".into(), false)), "a VM of that name");
        assert!(read("web1", "up").unwrap_err().starts_with("up is neither on nor off\n"));
    }

    #[test]
    fn so_it_is_with_a_limit() {
        let read = |words: [&str; 3]| {
            let [vm, direction, limit] = words.map(String::from);
            RateLimit { vm, direction, limit }.read().map_err(|e| e.to_string())
        };
        let limited =
            |direction, mbit_s| Ok(Request::RateLimit { vm: "web1".into(), direction, mbit_s });
        let (from, to) = (Direction::FromGuest, Direction::ToGuest);
        assert_eq!(read(["web1", "from-guest", "100"]), limited(from, Some(100)));
        assert_eq!(read(["from-guest", "100", "web1"]), limited(from, Some(100)));
        assert_eq!(read(["to-guest", "off", "web1"]), limited(to, None));
        assert!(read(["web1", "up", "100"]).unwrap_err().starts_with("up is no direction\n"));
        for limit in ["0", "100001", "-1", "fast"] {
            let refused = read(["web1", "to-guest", limit]).unwrap_err();
            assert!(refused.starts_with(&format!("{limit} is no limit\n")), "{refused}");
        }
    }
}
