use proptest::prelude::*;

use super::*;

const PLAIN: &str = "<domain type='kvm'>
  <name>vm1</name>
  <uuid>6f06aabf-5f78-4eef-9672-7e7da73ca911</uuid>
  <memory unit='KiB'>262144</memory>
  <currentMemory unit='KiB'>262144</currentMemory>
  <os>
    <type arch='x86_64' machine='pc-q35-11.1'>hvm</type>
  </os>
  <devices>
    <controller type='pci' index='0' model='pcie-root'/>
    <graphics type='vnc' passwd='s&amp;cret'/>
  </devices>
  <!-- kept -->
</domain>
";

fn attachment(last: u8) -> Attachment {
    let uuid = format!("0e6c2a3c-2d3b-4c44-a8f4-1d80f3a5d0{last:02x}");
    Attachment {
        socket: format!("/run/vgpud/vgpus/{uuid}/vfio.sock").into(),
        vgpu: Vgpu {
            uuid: uuid.parse().unwrap(),
            mdev_type: Some("SOFT-1Q".to_owned()),
            parent: None,
            core: Some(50),
            name: None,
        },
    }
}

fn attach(text: &str, attachment: &Attachment) -> String {
    Domain::parse(text).unwrap().attach(attachment).unwrap().unwrap()
}

fn detach(text: &str, which: Option<VgpuId>) -> String {
    Domain::parse(text).unwrap().detach(which).unwrap().0
}

fn refused(text: &str) -> String {
    Domain::parse(text).unwrap().attach(&attachment(0xa)).unwrap_err().to_string()
}

#[test]
fn attaching_adds_nothing_but_the_vgpu() {
    let expected = "<domain type='kvm' xmlns:qemu=\"http://libvirt.org/schemas/domain/qemu/1.0\">
  <name>vm1</name>
  <uuid>6f06aabf-5f78-4eef-9672-7e7da73ca911</uuid>
  <metadata>
    <tessera:vgpus xmlns:tessera=\"urn:tessera:domain:1\" added=\"memoryBacking\">
      <tessera:vgpu uuid=\"0e6c2a3c-2d3b-4c44-a8f4-1d80f3a5d00a\" type=\"SOFT-1Q\" core=\"50\"/>
    </tessera:vgpus>
  </metadata>
  <memory unit='KiB'>262144</memory>
  <currentMemory unit='KiB'>262144</currentMemory>
  <memoryBacking>
    <source type=\"memfd\"/>
    <access mode=\"shared\"/>
  </memoryBacking>
  <os>
    <type arch='x86_64' machine='pc-q35-11.1'>hvm</type>
  </os>
  <devices>
    <controller type='pci' index='0' model='pcie-root'/>
    <graphics type='vnc' passwd='s&amp;cret'/>
  </devices>
  <qemu:commandline>
    <qemu:arg value=\"-device\"/>
    <qemu:arg value=\"{&quot;driver&quot;:&quot;vfio-user-pci&quot;,&quot;socket&quot;:{&quot;path&quot;:&quot;/run/vgpud/vgpus/0e6c2a3c-2d3b-4c44-a8f4-1d80f3a5d00a/vfio.sock&quot;,&quot;type&quot;:&quot;unix&quot;},&quot;id&quot;:&quot;vgpu-0e6c2a3c&quot;,&quot;bus&quot;:&quot;pcie.0&quot;,&quot;addr&quot;:&quot;0x10&quot;}\"/>
    <qemu:arg value=\"-blockdev\"/>
    <qemu:arg value=\"{&quot;driver&quot;:&quot;vdi&quot;,&quot;node-name&quot;:&quot;use-vgpuctl-vm-save&quot;,&quot;read-only&quot;:true,&quot;file&quot;:{&quot;driver&quot;:&quot;file&quot;,&quot;filename&quot;:&quot;/run/vgpud/save-guard.vdi&quot;,&quot;locking&quot;:&quot;off&quot;}}\"/>
  </qemu:commandline>
  <!-- kept -->
</domain>
";
    assert_eq!(attach(PLAIN, &attachment(0xa)), expected);
    assert_eq!(detach(expected, None), PLAIN);
}

#[test]
fn attaching_again_updates_the_settings() {
    let attached = attach(PLAIN, &attachment(0xa));
    let domain = Domain::parse(&attached).unwrap();
    assert_eq!(domain.vgpus(), [attachment(0xa).vgpu]);
    assert_eq!(domain.attach(&attachment(0xa)), Ok(None));
    let mut other = attachment(0xa);
    (other.vgpu.core, other.vgpu.name) = (Some(60), "web1".parse().ok());
    assert_eq!(domain.attach(&other), Ok(Some(attach(PLAIN, &other))), "as if it were the first");
    other.vgpu.mdev_type = None;
    assert_eq!(domain.attach(&other), Err(DomainError::Differs(other.vgpu.uuid)));
}

#[test]
fn several_vgpus_have_different_slots_and_are_detached_one_by_one() {
    let one = attach(PLAIN, &attachment(1));
    let two = attach(&one, &attachment(2));
    assert!(two.contains("&quot;0x10&quot;") && two.contains("&quot;0x11&quot;"), "{two}");
    let error = Domain::parse(&two).unwrap().detach(None).unwrap_err().to_string();
    assert!(error.starts_with("has several vGPUs") && error.contains("d001, "), "{error}");
    assert_eq!(two.matches("save-guard.vdi").count(), 1, "one guard for the domain");
    assert_eq!(detach(&two, Some(attachment(2).vgpu.uuid)), one);
    let other = detach(&two, Some(attachment(1).vgpu.uuid));
    assert!(other.contains("save-guard.vdi"), "{other}");
    let waiting = Domain::parse(&two).unwrap().awaiting_state();
    assert_eq!(waiting.matches("<qemu:arg value=\"-incoming\"/>").count(), 1, "{waiting}");
    assert_eq!(Domain::parse(&waiting).unwrap().awaiting_state(), waiting, "once");
    assert_eq!(detach(&other, None), PLAIN);
}

#[test]
fn used_slots_are_skipped() {
    let with = |device: &str| PLAIN.replace("  </devices>", &format!("    {device}\n  </devices>"));
    let text =
        with("<x><address type='pci' domain='0x0000' bus='0x00' slot='0x10' function='0x0'/></x>");
    assert!(attach(&text, &attachment(1)).contains("&quot;0x11&quot;"));
    let text =
        with("<x><address type='pci' domain='0x0000' bus='0x01' slot='0x10' function='0x0'/></x>");
    assert!(attach(&text, &attachment(1)).contains("&quot;0x10&quot;"));
    let taken = |slot: u8| format!("<x><address type='pci' bus='0' slot='{slot}'/></x>");
    let full = (0..32).map(taken).collect::<Vec<_>>().concat();
    assert!(refused(&with(&full)).starts_with("has no free slot"));
    let all_but_one = (0..32).filter(|slot| *slot != 0x14).map(taken).collect::<Vec<_>>().concat();
    assert!(attach(&with(&all_but_one), &attachment(1)).contains("&quot;0x14&quot;"));
    let pc = PLAIN.replace("pcie-root", "pci-root").replace("q35", "i440fx");
    assert!(attach(&pc, &attachment(1)).contains("&quot;pci.0&quot;"));
    let none = PLAIN.replace("pcie-root", "none").replace("pc-q35", "microvm");
    assert!(refused(&none).starts_with("has no PCI bus"));
}

#[test]
fn memory_settings_are_kept() {
    let with = |backing: &str| PLAIN.replace("  <os>", &format!("  {backing}\n  <os>"));
    for (backing, added) in [
        ("<memoryBacking>\n    <hugepages/>\n  </memoryBacking>", "access"),
        ("<memoryBacking>\n    <locked/>\n  </memoryBacking>", "source access"),
        ("<memoryBacking>\n    <source type='file'/>\n  </memoryBacking>", "access"),
        ("<memoryBacking>\n    <access mode='shared'/>\n  </memoryBacking>", "source"),
    ] {
        let text = with(backing);
        let attached = attach(&text, &attachment(1));
        assert!(attached.contains(&format!("added=\"{added}\"")), "{attached}");
        assert!(attached.contains("shared"), "{attached}");
        assert_eq!(detach(&attached, None), text);
    }
    let shared =
        with("<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>");
    let attached = attach(&shared, &attachment(1));
    assert!(!attached.contains("added="), "{attached}");
    assert_eq!(detach(&attached, None), shared);
}

#[test]
fn private_memory_is_refused() {
    for (element, at) in [
        ("<memoryBacking><access mode='private'/></memoryBacking>", "<os>"),
        ("<memoryBacking><source type='anonymous'/></memoryBacking>", "<os>"),
        ("<cpu><numa><cell id='0' memAccess='private'/></numa></cpu>", "<os>"),
        ("<memory model='dimm' access='private'/>", "<graphics"),
    ] {
        let error = refused(&PLAIN.replace(at, &format!("{element}{at}")));
        assert!(error.starts_with("requests memory that no other process can map ("), "{error}");
    }
}

#[test]
fn elements_added_after_attaching_are_kept() {
    let attached = attach(PLAIN, &attachment(1));
    let changed = attached
        .replace("<access mode=\"shared\"/>", "<access mode=\"shared\"/>\n    <hugepages/>");
    let changed =
        changed.replace("</qemu:commandline>", "  <qemu:arg value='-S'/>\n  </qemu:commandline>");
    let detached = detach(&changed, None);
    assert!(detached.contains("<hugepages/>") && detached.contains("value='-S'"), "{detached}");
    assert!(!detached.contains("memfd") && !detached.contains("vfio-user"), "{detached}");
}

#[test]
fn foreign_metadata_and_arguments_are_kept() {
    let text = PLAIN
        .replace("<domain type='kvm'>", &format!("<domain type='kvm' xmlns:q='{QEMU}'>"))
        .replace(
            "  <memory ",
            "  <metadata>\n    <x:y xmlns:x='urn:x'/>\n  </metadata>\n  <memory ",
        )
        .replace(
            "</domain>",
            "  <q:commandline>\n    <q:arg value='-S'/>\n  </q:commandline>\n</domain>",
        );
    let attached = attach(&text, &attachment(1));
    assert!(attached.contains("<q:arg value=\"-device\"/>"), "{attached}");
    assert_eq!(Domain::parse(&attached).unwrap().vgpus().len(), 1);
    assert_eq!(detach(&attached, None), text);
}

#[test]
fn a_manually_attached_vgpu_is_recognized() {
    let by_hand = attach(PLAIN, &attachment(0xa));
    let start = by_hand.find("  <metadata>").unwrap();
    let end = by_hand.find("</metadata>\n").unwrap() + "</metadata>\n".len();
    let by_hand = format!("{}{}", &by_hand[..start], &by_hand[end..]);
    assert!(refused(&by_hand).contains("not written by attach"));
    let error = Domain::parse(&by_hand).unwrap().detach(None).unwrap_err();
    assert_eq!(error, DomainError::None);
}

#[test]
fn unsuitable_domains_are_refused() {
    assert!(
        refused(&PLAIN.replace("type='kvm'", "type='xen'"))
            .contains("is of type xen; a vGPU needs QEMU (type kvm or qemu)")
    );
    let unread = |text: &str| Domain::parse(text).unwrap_err().to_string();
    assert_eq!(
        unread("<network/>"),
        "is not a libvirt domain: the root element of its XML is <network>"
    );
    assert!(unread("nothing").starts_with("cannot be read: Not well-formed XML: "));
    let attached = attach(PLAIN, &attachment(0xa));
    let other = Domain::parse(&attached).unwrap().detach(Some(attachment(0xb).vgpu.uuid));
    let other = other.unwrap_err().to_string();
    assert!(
        other.starts_with("has no vGPU ") && other.contains("d00b; its vGPUs are: "),
        "{other}"
    );
    let mut differs = attachment(0xa);
    differs.vgpu.mdev_type = None;
    let differs = Domain::parse(&attached).unwrap().attach(&differs).unwrap_err().to_string();
    assert!(differs.starts_with("already has vGPU "), "{differs}");
    assert!(differs.ends_with(" with other settings; detach that vGPU first"), "{differs}");
}

#[test]
fn a_display_adapter_besides_the_vgpu_gets_a_note() {
    let video = |element: &str| PLAIN.replace("<graphics", &format!("{element}<graphics"));
    let noted = |text: &str, head| {
        let notes = Domain::parse(text).unwrap().notes(head);
        notes.iter().any(|note| note.contains("also has a display adapter (vga)"))
    };
    let other = video("<video><model type='vga'/></video>");
    assert!(noted(&other, true));
    assert!(!noted(&other, false), "a vGPU without a display leaves the domain its adapter");
    assert!(!noted(&video("<video><model type='none'/></video>"), true));
    assert!(!noted(PLAIN, true));
}

#[test]
fn the_qemu_user_comes_from_the_dac_label() {
    let label =
        "  <seclabel type='dynamic' model='dac'><label>+64055:+993</label></seclabel>\n</domain>";
    let text = PLAIN.replace("</domain>", label);
    let user = Domain::parse(&text).unwrap().qemu_user();
    assert_eq!(user, Some(("+64055".to_owned(), "+993".to_owned())));
    assert_eq!(Domain::parse(PLAIN).unwrap().qemu_user(), None);
}

proptest! {
    #[test]
    fn detaching_undoes_attaching(
        name in "[a-zA-Z0-9 <>&'\"-]{1,12}", parent in prop::option::of("[ -~]{1,12}"), core in 1..=100_u8,
    ) {
        let mut attachment = attachment(3);
        attachment.vgpu.mdev_type = Some(name);
        attachment.vgpu.parent = parent;
        attachment.vgpu.core = Some(core);
        attachment.vgpu.name = "web1".parse().ok();
        let attached = attach(PLAIN, &attachment);
        prop_assert_eq!(Domain::parse(&attached).unwrap().vgpus(), [attachment.vgpu]);
        prop_assert_eq!(detach(&attached, None), PLAIN);
    }
}
