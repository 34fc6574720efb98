package artifact

import (
	"bytes"
	"compress/flate"
	"encoding/binary"
	"hash/crc32"
	"testing"
)

const goodManifest = "kind: Plugin\nmetadata:\n  author: tester\n  name: toy\n  version: 1.10\n"

// member is one entry of an archive, with every lie that a header can tell.
type member struct {
	name, content string
	deflate       bool
	mode          uint32 // of stat(2), into the external attributes
	size          *uint32
	packed        *uint32
	crc           *uint32
	flags, method uint16
	at            *int // index of the member whose local header it claims as its own
}

func u32(v uint32) *uint32 { return &v }

func manifest() member { return member{name: "manifest.yaml", content: goodManifest, mode: 0o100644} }

// zipOf writes an archive byte by byte (APPNOTE.TXT 4.3), so that headers can lie.
func zipOf(t testing.TB, members ...member) []byte {
	t.Helper()
	var out, dir bytes.Buffer
	le := binary.LittleEndian
	put := func(b *bytes.Buffer, v ...any) {
		for _, x := range v {
			if err := binary.Write(b, le, x); err != nil {
				t.Fatal(err)
			}
		}
	}
	var offsets []uint32
	for _, m := range members {
		data, method := []byte(m.content), m.method
		if m.deflate {
			var z bytes.Buffer
			w, err := flate.NewWriter(&z, flate.BestCompression)
			if err == nil {
				_, err = w.Write(data)
			}
			if err == nil {
				err = w.Close()
			}
			if err != nil {
				t.Fatal(err)
			}
			data, method = z.Bytes(), 8
		}
		size, packed, crc := uint32(len(m.content)), uint32(len(data)), crc32.ChecksumIEEE([]byte(m.content))
		for _, o := range []struct{ v, lie *uint32 }{{&size, m.size}, {&packed, m.packed}, {&crc, m.crc}} {
			if o.lie != nil {
				*o.v = *o.lie
			}
		}
		flags := m.flags | 0x800 // names are UTF-8
		offset := uint32(out.Len())
		if m.at != nil {
			offset = offsets[*m.at]
		} else {
			put(&out, uint32(0x04034b50), uint16(20), flags, method, uint32(0), crc, packed, size, uint16(len(m.name)), uint16(0), []byte(m.name), data)
		}
		offsets = append(offsets, offset)
		put(&dir, uint32(0x02014b50), uint16(0x314), uint16(20), flags, method, uint32(0), crc, packed, size, uint16(len(m.name)),
			uint16(0), uint16(0), uint16(0), uint16(0), m.mode<<16, offset, []byte(m.name))
	}
	start := out.Len()
	out.Write(dir.Bytes())
	put(&out, uint32(0x06054b50), uint16(0), uint16(0), uint16(len(members)), uint16(len(members)), uint32(dir.Len()), uint32(start), uint16(0))
	return out.Bytes()
}
