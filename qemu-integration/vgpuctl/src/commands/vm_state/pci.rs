//! The vGPUs of a VM as PCI devices in QEMU: where they are, which is which, and writes to their
//! configuration space.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vgpud_api::{ConfigWrite, RestoredVgpu, Stats, Vgpu};

use super::monitor::Monitor;
use crate::commands::saving::blocking;
use crate::failure::Failure;
use vgpud_client::Client;

/// Vendor and device ids of vGPUs with and without a display. QEMU's own display adapters have the
/// first, too.
const IDS: [(u64, u64); 2] = [(0x1234, 0x1111), (0x1af4, 0x10f0)];
/// QEMU's name of devices that are served over vfio-user.
const DRIVER: &str = "child<vfio-user-pci>";
/// Objects that hold the devices of a command line.
const HOLDERS: [&str; 2] = ["/machine/peripheral", "/machine/peripheral-anon"];

/// Ports of configuration space, which q35 and i440fx have.
const ADDRESS_PORT: u16 = 0xcf8;
const DATA_PORT: u16 = 0xcfc;

/// Longest time until the statistics have a read of configuration space. vgpud returns earlier ones
/// of a worker that does not answer at once, as on a busy host.
const COUNT_LIMIT: Duration = Duration::from_secs(1);
const INTERVAL: Duration = Duration::from_millis(10);

/// Place of a device: bus in the upper byte, slot and function in the lower byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place(pub u16);

impl Place {
    /// Returns the value of the address port for a register.
    fn port_address(self, offset: u16) -> u32 {
        1 << 31 | u32::from(self.0) << 8 | u32::from(offset)
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:02x}:{:02x}.{:x}", self.0 >> 8, self.0 >> 3 & 0x1f, self.0 & 7)
    }
}

/// Device of QEMU that is served over vfio-user.
#[derive(Debug, PartialEq, Eq)]
struct Served {
    /// QEMU's id; empty for a device without one.
    id: String,
    /// Slot and function on its bus.
    devfn: u64,
}

/// Returns the number of a VM's devices that are served over vfio-user.
pub fn count(monitor: &mut Monitor) -> Result<usize, Failure> {
    served(monitor).map(|devices| devices.len())
}

/// Returns the places of a VM's vGPUs.
pub fn places(monitor: &mut Monitor) -> Result<Vec<Place>, Failure> {
    let served = served(monitor)?;
    Ok(find(&monitor.execute("query-pci", &json!({}))?, &served))
}

fn served(monitor: &mut Monitor) -> Result<Vec<Served>, Failure> {
    let mut found = Vec::new();
    for holder in HOLDERS {
        let children = monitor.execute("qom-list", &json!({ "path": holder }))?;
        let children = children.as_array().map(Vec::as_slice).unwrap_or_default();
        for child in children.iter().filter(|child| child["type"] == DRIVER) {
            let name = child["name"].as_str().unwrap_or_default();
            let path = format!("{holder}/{name}");
            let devfn = monitor.execute("qom-get", &json!({ "path": path, "property": "addr" }))?;
            let id = if holder == HOLDERS[0] { name } else { "" };
            found.push(Served { id: id.to_owned(), devfn: devfn.as_u64().unwrap_or(u64::MAX) });
        }
    }
    Ok(found)
}

fn find(buses: &Value, served: &[Served]) -> Vec<Place> {
    let mut found = Vec::new();
    for bus in buses.as_array().map(Vec::as_slice).unwrap_or_default() {
        collect(bus, served, &mut found);
    }
    found
}

fn collect(bus: &Value, served: &[Served], found: &mut Vec<Place>) {
    let devices = bus["devices"].as_array().map(Vec::as_slice).unwrap_or_default();
    for device in devices {
        let number = |name: &str| device[name].as_u64().unwrap_or_default();
        let (bus, devfn) = (number("bus"), number("slot") << 3 | number("function"));
        let (id, ids) = (device["qdev_id"].as_str().unwrap_or_default(), &device["id"]);
        let is_vgpu = IDS
            .iter()
            .any(|known| (&ids["vendor"], &ids["device"]) == (&json!(known.0), &json!(known.1)));
        if is_vgpu && served.iter().any(|served| served.id == id && served.devfn == devfn) {
            found.push(Place((bus as u16 & 0xff) << 8 | (devfn as u16 & 0xff)));
        }
        if device["pci_bridge"].is_object() {
            collect(&device["pci_bridge"], served, found);
        }
    }
}

/// Returns the places of vGPUs in a paused VM, in the order of the vGPUs.
///
/// QEMU does not say which vGPU a device is. Its reads of configuration space say so: a worker
/// counts them.
pub async fn identify(
    client: &Client,
    mut monitor: Monitor,
    vgpus: &[Vgpu],
) -> Result<(Monitor, Vec<Place>), Failure> {
    let (back, places) = blocking(move || {
        let places = places(&mut monitor)?;
        Ok((monitor, places))
    })
    .await?;
    monitor = back;
    let mut found = vec![None; vgpus.len()];
    let mut before = accesses(client, vgpus).await?;
    for place in places {
        monitor = blocking(move || {
            read_config(&mut monitor, place)?;
            Ok(monitor)
        })
        .await?;
        let deadline = Instant::now() + COUNT_LIMIT;
        let changed = loop {
            let after = accesses(client, vgpus).await?;
            let changed: Vec<_> = (0..vgpus.len()).filter(|at| before[*at] != after[*at]).collect();
            if !changed.is_empty() || Instant::now() > deadline {
                before = after;
                break changed;
            }
            tokio::time::sleep(INTERVAL).await;
        };
        if let [at] = changed[..] {
            found[at] = Some(place);
        }
    }
    let found: Option<Vec<_>> = found.into_iter().collect();
    let found = found.ok_or_else(|| {
        Failure::Local(
            "The monitor's VM does not have the vGPU, or all of the vGPUs; name the monitor of the \
             vGPU's VM"
                .to_owned(),
        )
    })?;
    Ok((monitor, found))
}

/// Returns how often each vGPU's configuration space was accessed.
async fn accesses(client: &Client, vgpus: &[Vgpu]) -> Result<Vec<u64>, Failure> {
    let stats: Stats = client.get("/v1/stats").await?;
    let of = |vgpu: &Vgpu| stats.vgpus.iter().find(|stats| stats.uuid == vgpu.uuid);
    Ok(vgpus.iter().map(|vgpu| of(vgpu).map_or(0, |stats| stats.traps.config)).collect())
}

fn read_config(monitor: &mut Monitor, place: Place) -> Result<(), Failure> {
    let lines = [
        format!("o/w {ADDRESS_PORT:#x} {:#x}", place.port_address(0)),
        format!("i/w {DATA_PORT:#x}"),
    ];
    restoring_address(monitor, &lines)
}

/// Makes the writes to a device's configuration space that a restored vGPU needs.
pub async fn program(
    mut monitor: Monitor,
    place: Place,
    restored: RestoredVgpu,
) -> Result<Monitor, Failure> {
    let lines: Vec<_> = restored
        .config
        .iter()
        .flat_map(|ConfigWrite { offset, value }| {
            [
                format!("o/w {ADDRESS_PORT:#x} {:#x}", place.port_address(*offset)),
                format!("o/w {DATA_PORT:#x} {value:#x}"),
            ]
        })
        .collect();
    blocking(move || {
        restoring_address(&mut monitor, &lines)?;
        Ok(monitor)
    })
    .await
}

/// Runs commands that change the address port. The guest may have been between its two accesses.
fn restoring_address(monitor: &mut Monitor, lines: &[String]) -> Result<(), Failure> {
    let before = monitor.human(&[format!("i/w {ADDRESS_PORT:#x}")])?;
    let before = before.split('=').nth(1).map_or("0", str::trim).to_owned();
    let last = format!("o/w {ADDRESS_PORT:#x} {before}");
    monitor.human(&[lines, &[last]].concat()).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vgpus_are_found_behind_bridges() {
        let served = |id: &str, devfn| Served { id: id.to_owned(), devfn };
        let host = json!({ "bus": 0, "slot": 0, "function": 0, "id": { "vendor": 0x8086 } });
        let ids = json!({ "vendor": 0x1234, "device": 0x1111 });
        let device = |bus: u8, slot: u8, id: &str| {
            json!({
                "bus": bus, "slot": slot, "function": 0, "id": ids, "qdev_id": id,
            })
        };
        let port = json!({
            "bus": 0, "slot": 2, "function": 1, "id": { "vendor": 0x1b36 }, "qdev_id": "port",
            "pci_bridge": { "bus": { "number": 3 }, "devices": [device(3, 16, "a")] },
        });
        let own = device(0, 16, "");
        let buses = json!([{ "bus": 0, "devices": [host, own, port, device(0, 5, "")] }]);
        let found = find(&buses, &[served("a", 0x80), served("", 0x28)]);
        assert_eq!(found, [Place(0x380), Place(0x28)], "not QEMU's own adapter");
        assert_eq!(Place(0x380).port_address(4), 0x8003_8004);
        assert_eq!(Place(0x381).to_string(), "03:10.1");
    }
}
