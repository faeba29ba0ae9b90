//! Networks: a switch each, so that ports of two have nothing to do with each other.
//!
//! The switch of a port answers for the station's location, taken MACs and listed addresses, and is
//! reached by that port only ([`Networks::of`]). So no frame crosses from one network into another,
//! and two networks may have the same addresses.

use super::{MacPlace, Switch};
use crate::port::PortId;
use crate::time::Instant;

/// All networks of an engine. There is always one.
///
/// As long as there is one alone, its switch is [`Self::alone`], at a fixed place, and nobody looks
/// up the network of a port.
#[derive(Debug)]
pub(crate) struct Networks {
    /// Empty if there are several networks.
    alone: Switch,
    list: Vec<Network>,
    /// More than one has ports.
    several: bool,
    /// By port number: a place in `list`.
    of_ports: Vec<u16>,
    seeds: [u64; 4],
}

#[derive(Debug)]
struct Network {
    name: String,
    /// How many it has.
    ports: u32,
    /// Of several.
    switch: Box<Switch>,
}

impl Networks {
    /// None has a port. `seeds` must be unpredictable for those behind the uplinks.
    pub(crate) fn new(seeds: [u64; 4]) -> Self {
        Self {
            alone: Switch::new(seeds),
            list: Vec::new(),
            several: false,
            of_ports: Vec::new(),
            seeds,
        }
    }

    /// The switch of all ports, if there is one network. Otherwise an empty one, whose guesses
    /// ([`Switch::peek`]) find nothing.
    #[inline(always)]
    pub(crate) const fn alone(&self) -> &Switch {
        &self.alone
    }

    /// The switch of `port`.
    #[inline(always)]
    pub(crate) fn of(&self, port: PortId) -> &Switch {
        if self.several { self.one_of_several(port) } else { &self.alone }
    }

    #[inline(never)]
    fn one_of_several(&self, port: PortId) -> &Switch {
        &self.list[self.place(port)].switch
    }

    /// The switch of `port`.
    #[inline(always)]
    pub(crate) fn of_mut(&mut self, port: PortId) -> &mut Switch {
        if self.several { self.one_of_several_mut(port) } else { &mut self.alone }
    }

    #[inline(never)]
    fn one_of_several_mut(&mut self, port: PortId) -> &mut Switch {
        let place = self.place(port);
        &mut self.list[place].switch
    }

    /// Nothing goes from one of these ports to the other.
    pub(crate) fn are_apart(&self, one: PortId, other: PortId) -> bool {
        let differ = self.several && self.place(one) != self.place(other);
        differ || self.of(one).are_apart(one, other)
    }

    /// The number of a port in the network of this name that does not exist; real ports have
    /// numbers below `ports`. `None`: there is no such network.
    pub(crate) fn nobody_in(&mut self, name: &str, ports: usize) -> Option<PortId> {
        let place = self.used(name)?;
        let port = PortId(u16::try_from(ports + place).ok()?);
        self.put(port, place);
        Some(port)
    }

    /// A port comes into the network of this name; its switch.
    pub(crate) fn join(&mut self, port: PortId, name: &str) -> &mut Switch {
        let used = self.used(name);
        let free = || self.list.iter().position(|network| network.ports == 0);
        let place = used.or_else(free).unwrap_or(self.list.len());
        if used.is_none() {
            let other = self.list.iter_mut().find(|network| network.ports > 0);
            if let Some(other) = other
                && !self.several
            {
                self.several = true;
                *other.switch = std::mem::replace(&mut self.alone, Switch::new(self.seeds));
            }
            // It knows nothing of one that is gone.
            let switch = Box::new(Switch::new(self.seeds));
            let new = Network { name: name.into(), ports: 0, switch };
            match self.list.get_mut(place) {
                Some(old) => *old = new,
                None => self.list.push(new),
            }
            if !self.several {
                self.alone = Switch::new(self.seeds);
            }
        }
        self.put(port, place);
        self.list[place].ports += 1;
        self.of_mut(port)
    }

    /// The MACs of the networks, a page at a time: those of the network with this number that stand
    /// behind `after`, or its first. `None`: there is no such network.
    pub(crate) fn places(
        &self,
        now: Instant,
        (network, after): (u16, Option<u64>),
        most: usize,
    ) -> Option<Vec<MacPlace>> {
        let switch = match (self.several, network) {
            (true, network) => &self.list.get(usize::from(network))?.switch,
            (false, 0) => &self.alone,
            (false, _) => return None,
        };
        Some(switch.places(now, after, most))
    }

    fn used(&self, name: &str) -> Option<usize> {
        self.list.iter().position(|network| network.ports > 0 && network.name == name)
    }

    fn put(&mut self, port: PortId, place: usize) {
        let at = usize::from(port.0);
        if self.of_ports.len() <= at {
            self.of_ports.resize(at + 1, 0);
        }
        self.of_ports[at] = u16::try_from(place).expect("no more networks than ports");
    }

    /// The port goes, and every MAC behind it.
    pub(crate) fn leave(&mut self, port: PortId) {
        self.of_mut(port).remove_port(port);
        let place = self.place(port);
        self.list[place].ports = self.list[place].ports.saturating_sub(1);
        let mut used = self.list.iter_mut().filter(|network| network.ports > 0);
        if let (true, Some(last), None) = (self.several, used.next(), used.next()) {
            self.alone = std::mem::replace(&mut *last.switch, Switch::new(self.seeds));
            self.several = false;
        }
    }

    fn place(&self, port: PortId) -> usize {
        self.of_ports.get(usize::from(port.0)).map_or(0, |place| usize::from(*place))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Mac, Out};
    use super::*;
    use crate::wire::packet::VlanStack;

    const NOW: Instant = Instant::from_secs(5);
    const MAC: Mac = [2, 0, 0, 0, 0, 7];
    const RED: [PortId; 2] = [PortId(0), PortId(2)];
    const BLUE: [PortId; 2] = [PortId(1), PortId(3)];

    fn lookup(networks: &mut Networks, port: PortId) -> Out {
        networks.of_mut(port).lookup(NOW, port, VlanStack::default(), MAC)
    }

    #[test]
    fn what_is_heard_in_one_network_is_not_known_in_another() {
        let mut networks = Networks::new([1, 2, 3, 4]);
        for (ports, name) in [(RED, "red"), (BLUE, "blue")] {
            for port in ports {
                networks.join(port, name);
            }
        }
        networks.of_mut(RED[0]).learn(NOW, RED[0], VlanStack::default(), MAC);
        assert_eq!(lookup(&mut networks, RED[1]), Out::Port(RED[0]));
        assert_eq!(lookup(&mut networks, BLUE[1]), Out::Flood);
        networks.of_mut(BLUE[0]).learn(NOW, BLUE[0], VlanStack::default(), MAC);
        assert_eq!(lookup(&mut networks, BLUE[1]), Out::Port(BLUE[0]));
        assert_eq!(lookup(&mut networks, RED[1]), Out::Port(RED[0]));
        assert!(networks.are_apart(RED[0], BLUE[0]) && !networks.are_apart(RED[0], RED[1]));
    }

    #[test]
    fn a_second_network_takes_nothing_from_the_first() {
        let mut networks = Networks::new([1, 2, 3, 4]);
        for port in RED {
            networks.join(port, "red");
        }
        networks.of_mut(RED[0]).learn(NOW, RED[0], VlanStack::default(), MAC);
        let known = |networks: &Networks| networks.alone().peek(NOW, VlanStack::default(), MAC);
        assert_eq!(lookup(&mut networks, RED[1]), Out::Port(RED[0]));
        assert_eq!(known(&networks), Some(RED[0]));
        networks.join(BLUE[0], "blue");
        assert_eq!(lookup(&mut networks, RED[1]), Out::Port(RED[0]), "it is known still");
        assert_eq!(lookup(&mut networks, BLUE[0]), Out::Flood);
        assert_eq!(known(&networks), None, "and guessed no longer");
    }

    #[test]
    fn two_networks_may_have_one_mac_and_a_network_that_is_gone_leaves_nothing() {
        let mut networks = Networks::new([1, 2, 3, 4]);
        for (port, name) in [(RED[0], "red"), (BLUE[0], "blue")] {
            networks.join(port, name).add_guest(port, Some(MAC), None).unwrap();
        }
        let second = networks.join(RED[1], "red").add_guest(RED[1], Some(MAC), None);
        assert!(second.is_err(), "but not twice");
        networks.leave(RED[1]);
        networks.leave(RED[0]);
        networks.join(RED[0], "green");
        networks.join(RED[1], "green");
        assert_eq!(networks.list.len(), 2, "its place is used again");
        assert_eq!(lookup(&mut networks, RED[1]), Out::Flood);
        assert!(networks.are_apart(RED[0], BLUE[0]));
    }

    #[test]
    fn the_last_network_is_alone_again_with_all_that_it_knows() {
        let mut networks = Networks::new([1, 2, 3, 4]);
        for (port, name) in RED.map(|port| (port, "red")).into_iter().chain([(BLUE[0], "blue")]) {
            networks.join(port, name);
        }
        networks.join(BLUE[1], "blue");
        networks.of_mut(BLUE[0]).learn(NOW, BLUE[0], VlanStack::default(), MAC);
        RED.into_iter().for_each(|port| networks.leave(port));
        assert_eq!(lookup(&mut networks, BLUE[1]), Out::Port(BLUE[0]));
        let known = networks.alone().peek(NOW, VlanStack::default(), MAC);
        assert_eq!(known, Some(BLUE[0]), "and is looked at without asking for whose");
        assert!(!networks.are_apart(BLUE[0], BLUE[1]));
        // And it is one of several again.
        networks.join(RED[0], "red");
        assert_eq!(lookup(&mut networks, BLUE[1]), Out::Port(BLUE[0]));
        assert_eq!(lookup(&mut networks, RED[0]), Out::Flood);
        assert!(networks.are_apart(RED[0], BLUE[0]));
    }
}
