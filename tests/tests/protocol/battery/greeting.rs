//! VERSION, its capabilities, and the twin socket.

use std::path::Path;

use libc::EINVAL;
use system_tests::bytes;
use system_tests::raw_client::*;

use super::CONFIG;

pub fn version(path: &Path) {
    let mut client = RawClient::connect(path);
    for command in [0_u16, 2, 3, 4, 5, 6, 7, 8, 9, 10, 13, 15, 16, 999] {
        let reply = client.request(command, &[0; 64], &[]);
        assert_eq!(reply.flags, 0x21, "command {command} before the version");
        assert_ne!(reply.error, 0);
    }
    for major in [1_u16, 2, 0xffff] {
        client.fails(VERSION, &bytes![major, 0_u16], EINVAL);
    }
    for len in 0..4 {
        client.fails(VERSION, &[0; 4][..len], EINVAL);
    }
    for data in [
        &b"{}"[..],
        b"{\"capabilities\":{}}",
        b"{\0",
        b"\xff\xfe\0",
        b"7\0",
        b"{\"capabilities\":{\"max_msg_fds\":\"many\"}}\0",
        b"{\"capabilities\":{\"max_msg_fds\":-1}}\0",
        b"{\"capabilities\":[[[[[[[[\0",
    ] {
        client.fails(VERSION, &[&bytes![0_u16, 0_u16], data].concat(), EINVAL);
    }
    let deep = [bytes![0_u16, 0_u16], vec![b'['; 500_000], vec![0]].concat();
    client.fails(VERSION, &deep, EINVAL);
    client.ok(VERSION, &[&bytes![0_u16, 0_u16], QEMU_CAPS].concat());
    client.fails(VERSION, &[&bytes![0_u16, 0_u16], QEMU_CAPS].concat(), EINVAL);
    client.ok(GET_INFO, &bytes![16_u32, 0_u32, 0_u32, 0_u32]);
}

pub fn version_reply(path: &Path) {
    let offers: [&[u8]; 7] = [
        b"",
        b"\0",
        b"{}\0",
        b"{\"capabilities\":{}}\0",
        b"{\"capabilities\":{\"max_msg_fds\":1}}\0",
        b"{\"capabilities\":{\"max_msg_fds\":8,\"max_data_xfer_size\":4096,\"migration\":{\"pgsize\":4096}}}\0",
        QEMU_CAPS,
    ];
    for (minor, offer) in (0_u16..).zip(offers) {
        let mut client = RawClient::connect(path);
        let reply = client.ok(VERSION, &[&bytes![0_u16, minor], offer].concat());
        assert!(reply.payload.len() <= 4 + offer.len(), "longer than the request");
        let u16_at = |at: usize| u16::from_ne_bytes(reply.payload[at..at + 2].try_into().unwrap());
        assert_eq!(u16_at(0), 0);
        assert!(u16_at(2) <= minor);
        let Some((0, json)) = reply.payload[4..].split_last() else {
            assert!(reply.payload.len() == 4, "JSON without a NUL");
            continue;
        };
        let asked = String::from_utf8_lossy(offer);
        let json: serde_json::Value = serde_json::from_slice(json).unwrap();
        for (name, value) in json["capabilities"].as_object().unwrap() {
            assert!(asked.contains(name.as_str()), "unrequested capability {name}");
            match name.as_str() {
                "max_msg_fds" => assert!((1..=16).contains(&value.as_u64().unwrap())),
                "pgsizes" => assert_eq!(value, 4096),
                _ => {}
            }
        }
        assert!(offer != QEMU_CAPS || json["capabilities"]["write_multiple"] == true);
    }
}

pub fn twin(path: &Path) {
    for (asked, caps) in [
        (true, &b"{\"capabilities\":{\"max_msg_fds\":8,\"twin_socket\":{\"supported\":true}   }             }\0"[..]),
        (true, b"{\"capabilities\":{\"twin_socket\":{\"supported\":true}}}\0"),
        (false, b"{\"capabilities\":{\"twin_socket\":{\"supported\":false}}}                \0"),
        (false, b"{\"capabilities\":{\"twin_socket\":{}}}                                    \0"),
    ] {
        let mut client = RawClient::connect(path);
        let reply = client.ok(VERSION, &[&bytes![0_u16, 0_u16], caps].concat());
        let json = String::from_utf8(reply.payload[4..].to_vec()).unwrap();
        let given = json.contains("\"twin_socket\":{\"supported\":true,\"fd_index\":0}");
        assert!(asked || !given, "{json}");
        assert_eq!(reply.fds.len(), usize::from(given), "{json}");
        client.read(CONFIG, 0, 4);
        if let Some(fd) = reply.fds.into_iter().next() {
            let mut twin = RawClient::over(fd.into());
            // The twin socket expects no messages: neither replies, requests nor its end do harm.
            twin.send(DMA_READ, 1, &[0; 20], &[]);
            twin.send(REGION_READ, 0, &bytes![0_u64, CONFIG, 4_u32], &[]);
            client.read(CONFIG, 0, 4);
            drop(twin);
        }
        client.read(CONFIG, 0, 4);
    }
    let mut client = RawClient::connect(path);
    let bad = b"{\"capabilities\":{\"twin_socket\":true}}\0";
    client.fails(VERSION, &[&bytes![0_u16, 0_u16], &bad[..]].concat(), EINVAL);
}
