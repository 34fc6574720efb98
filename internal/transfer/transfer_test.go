package transfer

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

func TestKeys(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("k", 255)
	for _, key := range []string{"a", "0", "a.b", "a-b_c.D", "0123456789abcdef-" + strings.Repeat("f", 32) + ".png", long} {
		if err := checkKey(key); err != nil {
			t.Errorf("%q: %v", key, err)
		}
	}
	for _, key := range []string{"", ".", "..", ".a", "-a", "_a", "a..b", "../a", "a/b", "a/../b", "/a", "a\\b", " a", "a ", "a\n", "a\x00", "é", long + "k", ".transfer-owners", ".payload-x.tmp"} {
		if err := checkKey(key); !errdefs.Is(err, errdefs.Invalid) || pluginwire.FromError(err) != "ValueError: Invalid file transfer key" {
			t.Errorf("%q: %v", key, err)
		}
	}
}

func TestNewKey(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, ext := range []string{"", "png", ".png", "..png.", "a_b-C9", strings.Repeat("x", 32)} {
		key, err := NewKey(ext)
		if err != nil || checkKey(key) != nil || !isMinted(key) || seen[key] || len(key) > 68 && !strings.HasSuffix(key, "."+strings.Trim(ext, ".")) {
			t.Errorf("%q: %q, %v", ext, key, err)
		}
		seen[key] = true
	}
	for _, ext := range []string{"_x", "-x", "a.b", "a/b", "a b", strings.Repeat("x", 33), "é"} {
		if key, err := NewKey(ext); !errdefs.Is(err, errdefs.Invalid) {
			t.Errorf("%q: %q, %v", ext, key, err)
		}
	}
	for _, key := range []string{"ft1_", "ft1_" + strings.Repeat("A", 64), "ft1_" + strings.Repeat("a", 63), "ft1_" + strings.Repeat("a", 65),
		"ft1_" + strings.Repeat("a", 64) + ".", "ft1_" + strings.Repeat("a", 64) + ".a.b", "x" + strings.Repeat("a", 64)} {
		if isMinted(key) {
			t.Errorf("%q counts as ours", key)
		}
	}
}

func TestRoundTrip(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := open(t, dir, 0)
	rapid.Check(t, func(t *rapid.T) {
		h := s.Holder(nil)
		defer h.Close()
		size := rapid.OneOf(rapid.IntRange(0, 100), rapid.IntRange(ChunkBytes-2, ChunkBytes+2), rapid.IntRange(2*ChunkBytes-1, 2*ChunkBytes+1), rapid.IntRange(0, 100_000)).Draw(t, "size")
		data := bytes.Repeat([]byte{byte(size), 0, 255, '\n', 7}, size/5+1)[:size]
		from := rapid.SampledFrom([]pluginwire.Context{{}, slotA, legacy(slotA), slotA.Workspace()}).Draw(t, "from")
		key := rapid.SampledFrom([]string{"", "old-key.png"}).Draw(t, "key")
		if key == "" {
			key, _ = NewKey("")
		}
		if err := push(h, key, data, from); err != nil {
			t.Fatal(err)
		}
		got, err := s.Read(key, from)
		if err != nil || !bytes.Equal(got, data) {
			t.Fatalf("%d bytes, %v; want %d", len(got), err, size)
		}
		f, n, err := s.OpenFile(key, from)
		if err != nil || n != int64(size) {
			t.Fatalf("opened %d, %v", n, err)
		}
		defer f.Close()
		for range 2 {
			if err := s.Delete(key, from); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := s.Read(key, from); !errdefs.Is(err, errdefs.NotFound) {
			t.Fatalf("deleted, then read: %v", err)
		}
		if got, err := io.ReadAll(f); err != nil || !bytes.Equal(got, data) {
			t.Fatalf("a file that is open is read to the end: %d bytes, %v", len(got), err)
		}
		if h.Held() != 0 {
			t.Fatalf("holds %d", h.Held())
		}
	})
	if left := files(t, dir); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("the directory is %v, %v", info.Mode(), err)
	}
}

// SW-03 and its relatives: who sees whose file.
func TestAnothersKeyLooksMissing(t *testing.T) {
	t.Parallel()
	elsewhere := slotA
	elsewhere.WorkspaceUUID = "v"
	later := slotA
	later.PlacementGeneration = 2
	everybody := []pluginwire.Context{{}, slotA, slotB, binding("a", 2), legacy(slotA), legacy(slotB), slotA.Workspace(), elsewhere, legacy(elsewhere), later, legacy(later)}
	for _, minted := range []bool{true, false} {
		for _, owner := range everybody {
			s := open(t, t.TempDir(), 0)
			h := s.Holder(nil)
			key := "old-key.png"
			if minted {
				key = newKey(t)
			}
			must(t, push(h, key, []byte("secret"), owner))
			for _, as := range everybody {
				want := as == owner || minted && (as.IsZero() || owner.IsBinding() && as == legacy(owner))
				got, err := s.Read(key, as)
				if (err == nil) != want || err != nil && !errdefs.Is(err, errdefs.NotFound) || err == nil && string(got) != "secret" {
					t.Errorf("minted %v, owner %v, as %v: %q, %v", minted, owner, as, got, err)
				}
				if !want {
					must(t, s.Delete(key, as)) // nothing happens
					_, missing := s.Read(newKey(t), as)
					if err == nil || err.Error() != missing.Error() {
						t.Errorf("another's key says %v, a missing one %v", err, missing)
					}
				}
			}
			wantFile(t, s, key, owner, "secret")
			must(t, h.Close())
			wantCode(t, "after the holder closed", second(s.Read(key, owner)), errdefs.NotFound)
		}
	}
}

func second[T any](_ T, err error) error { return err }

// TestLegacyKeysAreEachOwnersOwn: two owners may use one key that is not minted.
func TestLegacyKeysAreEachOwnersOwn(t *testing.T) {
	t.Parallel()
	s := open(t, t.TempDir(), 0)
	h := s.Holder(nil)
	must(t, push(h, "k", []byte("one"), slotA))
	must(t, push(h, "k", []byte("two"), slotB))
	wantFile(t, s, "k", slotA, "one")
	must(t, s.Delete("k", slotA))
	wantFile(t, s, "k", slotB, "two")
	// A minted one has one owner, whoever that is.
	key := newKey(t)
	must(t, push(h, key, []byte("one"), slotA))
	wantCode(t, "another owner with a minted key", push(h, key, []byte("two"), slotB), errdefs.Invalid)
	wantFile(t, s, key, slotA, "one")
	must(t, h.Close())
}

func TestChunksComeInOrder(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := open(t, dir, 0)
	h, other := s.Holder(nil), s.Holder(nil)
	key := newKey(t)
	part := func(h *Holder, index, amount int, from pluginwire.Context) error {
		return h.Chunk(message(key, index, amount, []byte{byte('0' + index)}), from)
	}
	refused := func(what string, err error) {
		t.Helper()
		if !errdefs.Is(err, errdefs.Invalid) || !strings.Contains(err.Error(), "Invalid file transfer capability") {
			t.Errorf("%s: %v", what, err)
		}
	}
	refused("a beginning in the middle", part(h, 1, 3, slotA))
	must(t, part(h, 0, 3, slotA))
	refused("the first again", part(h, 0, 3, slotA))
	refused("one left out", part(h, 2, 3, slotA))
	refused("another amount", part(h, 1, 4, slotA))
	refused("another context", part(h, 1, 3, slotB))
	refused("the same installation with less authority", part(h, 1, 3, legacy(slotA)))
	refused("another holder's beginning", part(other, 0, 3, slotA))
	refused("another holder's next", part(other, 1, 3, slotA))
	must(t, part(h, 1, 3, slotA))
	refused("the second again", part(h, 1, 3, slotA))
	wantCode(t, "a part of a file", second(s.Read(key, slotA)), errdefs.NotFound)
	must(t, part(h, 2, 3, slotA))
	wantFile(t, s, key, slotA, "012")
	refused("the last again", part(h, 2, 3, slotA))
	refused("a file that is there", part(h, 0, 3, slotA))
	refused("a file that is there, by another", part(other, 0, 1, slotA))
	wantFile(t, s, key, slotA, "012")
	must(t, s.Delete(key, slotA))
	must(t, part(other, 0, 1, slotB)) // the key is free again
	must(t, other.Close())
	must(t, h.Close())
	if left := files(t, dir); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

// TestTwoStoresNeverOverwrite: what two stores do not know of each other, link(2)
// decides: the first to finish has the key.
func TestTwoStoresNeverOverwrite(t *testing.T) {
	t.Parallel()
	for name, key := range map[string]string{"minted": newKey(t), "legacy": "old-key"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			one, two := open(t, dir, 0), open(t, dir, 0)
			h1, h2 := one.Holder(nil), two.Holder(nil)
			must(t, h1.Chunk(message(key, 0, 2, []byte("a")), slotA))
			must(t, h2.Chunk(message(key, 0, 2, []byte("b")), slotA))
			must(t, h2.Chunk(message(key, 1, 2, []byte("b")), slotA))
			wantCode(t, "the second to finish", h1.Chunk(message(key, 1, 2, []byte("a")), slotA), errdefs.Invalid)
			wantFile(t, one, key, slotA, "bb")
			must(t, h1.Close())
			wantFile(t, one, key, slotA, "bb")
			must(t, one.Delete(key, slotA))
			must(t, h2.Close()) // what it received is gone, which is what it wants
			if left := files(t, dir); len(left) != 0 {
				t.Errorf("left: %v", left)
			}
		})
	}
	// A minted key that two owners finish: the record decides.
	dir, key := t.TempDir(), newKey(t)
	one, two := open(t, dir, 0), open(t, dir, 0)
	h1, h2 := one.Holder(nil), two.Holder(nil)
	must(t, h1.Chunk(message(key, 0, 2, nil), slotA))
	must(t, push(h2, key, []byte("b"), slotB))
	wantCode(t, "the second owner", h1.Chunk(message(key, 1, 2, nil), slotA), errdefs.Invalid)
	wantFile(t, one, key, slotB, "b")
	if left := files(t, dir); len(left) != 3 { // a space, the file, the record
		t.Errorf("left: %v", left)
	}
}

// What all owners of a connection hold together is bounded too.
func TestManyOwners(t *testing.T) {
	t.Parallel()
	s := open(t, t.TempDir(), 0)
	h := s.Holder(nil)
	for i := range MaxOfAll {
		must(t, push(h, fmt.Sprint("k", i), nil, binding(fmt.Sprint("owner", i/MaxHeld), 1)))
	}
	err := push(h, "more", nil, slotA)
	wantCode(t, "one more", err, errdefs.Exhausted)
	if err == nil || !strings.Contains(err.Error(), fmt.Sprint(MaxOfAll)) {
		t.Errorf("the limit is not named: %v", err)
	}
	must(t, h.Close())
	if len(h.own) != 0 {
		t.Errorf("%d owners are counted", len(h.own))
	}
}

// Senders that gave up in the middle of a file do not fill a connection for ever.
func TestStalledFilesMakeRoom(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		s := open(t, dir, 0)
		h := s.Holder(nil)
		for i := range MaxHeld {
			must(t, h.Chunk(message(fmt.Sprint("k", i), 0, 3, nil), slotA))
		}
		time.Sleep(Stalled - time.Second) // virtual
		must(t, h.Chunk(message("k7", 1, 3, nil), slotA))
		wantCode(t, "one more, too early", h.Chunk(message("more", 0, 1, nil), slotA), errdefs.Exhausted)
		time.Sleep(time.Second)
		must(t, push(h, "more", []byte("m"), slotA))
		wantFile(t, s, "more", slotA, "m")
		must(t, h.Chunk(message("k7", 2, 3, nil), slotA)) // it did not stand still
		wantCode(t, "a file that was dropped", h.Chunk(message("k8", 1, 3, nil), slotA), errdefs.Invalid)
		if n := h.Held(); n != 2 {
			t.Errorf("holds %d", n)
		}
		must(t, h.Close())
		if left := files(t, dir); len(left) != 0 {
			t.Errorf("left: %v", left)
		}
	})
}

// Nor do files that came whole and that nobody asked for.
func TestUnclaimedFilesMakeRoom(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		s := open(t, dir, 0)
		h := s.Holder(nil)
		must(t, push(h, "first", nil, slotA))
		time.Sleep(time.Second) // virtual
		for i := range MaxHeld - 1 {
			must(t, push(h, fmt.Sprint("k", i), nil, slotA))
		}
		time.Sleep(Unclaimed - time.Second - 1)
		wantCode(t, "one more, too early", push(h, "more", nil, slotA), errdefs.Exhausted)
		time.Sleep(time.Nanosecond)
		must(t, push(h, "more", []byte("m"), slotA))
		wantFile(t, s, "more", slotA, "m")
		wantFile(t, s, "k7", slotA, "")
		if _, err := s.Read("first", slotA); !errdefs.Is(err, errdefs.NotFound) {
			t.Errorf("the oldest: %v", err)
		}
		must(t, h.Close())
		if left := files(t, dir); len(left) != 0 {
			t.Errorf("left: %v", left)
		}
	})
}

func TestLimits(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := open(t, dir, ChunkBytes+10)
	h := s.Holder(nil)
	whole := bytes.Repeat([]byte("x"), ChunkBytes)
	must(t, push(h, "fits", append(whole, "0123456789"...), slotA))
	must(t, h.Chunk(message("large", 0, 3, whole), slotA))
	err := h.Chunk(message("large", 1, 3, []byte("0123456789a")), slotA)
	wantCode(t, "a byte too many", err, errdefs.Exhausted)
	if err == nil || !strings.Contains(err.Error(), fmt.Sprint(ChunkBytes+10)) {
		t.Errorf("the limit is not named: %v", err)
	}
	wantCode(t, "the next chunk of what was dropped", h.Chunk(message("large", 1, 3, nil), slotA), errdefs.Invalid)
	wantCode(t, "sending too much", second(s.Send(t.Context(), nil, make([]byte, ChunkBytes+11), "", slotA)), errdefs.Exhausted)
	wantCode(t, "a chunk that is too large", h.Chunk(message("c", 0, 2, append(whole, 'x')), slotA), errdefs.Invalid)

	// 128 of a connection: what comes and what came.
	for i := h.Held(); i < MaxHeld; i++ {
		must(t, h.Chunk(message(fmt.Sprint("k", i), 0, 1+i%2, nil), slotA))
	}
	if h.Held() != MaxHeld {
		t.Errorf("holds %d", h.Held())
	}
	wantCode(t, "one more", h.Chunk(message("more", 0, 1, nil), slotA), errdefs.Exhausted)
	must(t, push(h, "sibling", nil, slotB)) // another owner on the same connection has its own
	must(t, s.Delete("sibling", slotB))
	other := s.Holder(nil)
	must(t, push(other, "more", nil, slotA)) // another connection has its own
	must(t, other.Close())
	must(t, h.Chunk(message("k1", 1, 2, nil), slotA)) // what comes may finish
	must(t, s.Delete("k1", slotA))
	must(t, push(h, "more", nil, slotA))
	must(t, h.Close())
	if left := files(t, dir); len(left) != 0 || h.Held() != 0 {
		t.Errorf("left: %v, held %d", left, h.Held())
	}
	// A smaller limit also holds for what is there.
	must(t, push(s.Holder(nil), "large", whole, slotA))
	small := open(t, dir, 10)
	wantCode(t, "reading beyond the limit", second(small.Read("large", slotA)), errdefs.Exhausted)
}

func TestChunkRefusals(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	h := open(t, dir, 0).Holder(nil)
	good := `{"file_key":"k","chunk_index":0,"chunk_amount":1,"chunk_base64":""}`
	for _, c := range []struct{ old, new, text string }{
		{`"file_key":"k",`, ``, `KeyError: 'file_key'`},
		{`"chunk_index":0,`, ``, `KeyError: 'chunk_index'`},
		{`"chunk_amount":1,`, ``, `KeyError: 'chunk_amount'`},
		{`,"chunk_base64":""`, ``, `KeyError: 'chunk_base64'`},
		{good, `{}`, `KeyError: 'file_key'`},
		{good, `[]`, `ValueError: the value is not an object`},
		{`"k"`, `"../k"`, `ValueError: Invalid file transfer key`},
		{`"k"`, `7`, `ValueError: Invalid file transfer key`},
		{`"k"`, `"a\u002fb"`, `ValueError: Invalid file transfer key`},
		{`"chunk_index":0`, `"chunk_index":1`, `ValueError: chunk_index`},
		{`"chunk_index":0`, `"chunk_index":-1`, `ValueError: chunk_index`},
		{`"chunk_index":0`, `"chunk_index":false`, `ValueError: chunk_index`},
		{`"chunk_index":0`, `"chunk_index":"0"`, `ValueError: chunk_index`},
		{`"chunk_index":0`, `"chunk_index":0.0`, `ValueError: chunk_index`},
		{`"chunk_amount":1`, `"chunk_amount":0`, `ValueError: chunk_index`},
		{`"chunk_amount":1`, `"chunk_amount":99999999999999999999`, `ValueError: chunk_index`},
		{`64":""`, `64":null`, `ValueError: chunk_base64`},
		{`64":""`, `64":"!!!!"`, `ValueError: chunk_base64`},
		{`64":""`, `64":"QQ="`, `ValueError: chunk_base64`},
		{`64":""`, `64":"QQ==QQ=="`, `ValueError: chunk_base64`},
		{`64":""`, `64":"Q\nQ=="`, `ValueError: chunk_base64`},
		{`64":""`, `64":"QQ==\r\n"`, `ValueError: chunk_base64`},
		{`64":""`, `64":"_-_-"`, `ValueError: chunk_base64`},
		{`64":""`, `64":"` + strings.Repeat("A", chunkText+4) + `"`, `ValueError: chunk_base64`},
	} {
		err := h.Chunk([]byte(strings.Replace(good, c.old, c.new, 1)), slotA)
		if err == nil || !strings.HasPrefix(pluginwire.FromError(err), c.text) {
			t.Errorf("%s → %.60s: %v, want %s", c.old, c.new, err, c.text)
		}
	}
	if left := files(t, dir); len(left) != 0 || h.Held() != 0 {
		t.Errorf("left: %v", left)
	}
	// What JSON may write otherwise is the same text.
	must(t, h.Chunk([]byte(`{ "chunk_base64" : "\/\/8=", "chunk_index":0, "chunk_amount":1, "file_key":"k", "more":[{}] }`), slotA))
	wantFile(t, h.store, "k", slotA, "\xff\xff")
}

// LF-01 and LF-02: what may send here is the caller's to say, for every chunk anew.
func TestAdmit(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := open(t, dir, 0)
	live := map[pluginwire.Context]bool{slotA: true}
	gone := errdefs.New(errdefs.Denied, "no live registration")
	h := s.Holder(func(from pluginwire.Context) error {
		if !live[from] {
			return gone
		}
		return nil
	})
	key := newKey(t)
	for _, from := range []pluginwire.Context{{}, slotB, legacy(slotA), slotA.Workspace(), binding("a", 2)} {
		if err := h.Chunk(message(key, 0, 2, nil), from); !errors.Is(err, gone) {
			t.Errorf("%v: %v", from, err)
		}
	}
	must(t, h.Chunk(message(key, 0, 3, []byte("a")), slotA))
	if err := h.Chunk(message(key, 1, 3, nil), slotB); !errors.Is(err, gone) {
		t.Errorf("a stranger: %v", err)
	}
	must(t, h.Chunk(message(key, 1, 3, []byte("b")), slotA)) // whom it did not disturb
	live[slotA] = false
	if err := h.Chunk(message(key, 2, 3, []byte("c")), slotA); !errors.Is(err, gone) {
		t.Errorf("revoked: %v", err)
	}
	if left := files(t, dir); len(left) != 0 || h.Held() != 0 {
		t.Errorf("what a revoked sender had sent is left: %v", left)
	}
	live[slotA] = true
	wantCode(t, "the rest of what was dropped", h.Chunk(message(key, 2, 3, nil), slotA), errdefs.Invalid)
	must(t, h.Close())
}

func TestClose(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := open(t, dir, 0)
	h, other := s.Holder(nil), s.Holder(nil)
	must(t, push(h, "whole", []byte("1"), slotA))
	must(t, h.Chunk(message("part", 0, 2, []byte("2")), slotA))
	must(t, push(other, "other", []byte("3"), slotA))
	for range 2 {
		must(t, h.Close())
	}
	wantCode(t, "a chunk after the end", h.Chunk(message("k", 0, 1, nil), slotA), errdefs.Unavailable)
	wantCode(t, "what was received", second(s.Read("whole", slotA)), errdefs.NotFound)
	wantFile(t, s, "other", slotA, "3")
	must(t, other.Chunk(message("part", 0, 1, []byte("4")), slotA)) // the key is free
	must(t, other.Close())
	if left := files(t, dir); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
	late := s.Holder(nil)
	must(t, push(late, "late", nil, slotA))
	for range 2 {
		must(t, s.Close())
	}
	wantCode(t, "a closed store's chunk", late.Chunk(message("k", 0, 1, nil), slotA), errdefs.Unavailable)
	wantCode(t, "a closed store's file", second(s.Read("late", slotA)), errdefs.Unavailable)
	wantCode(t, "a closed store's deletion", s.Delete("late", slotA), errdefs.Unavailable)
	wantCode(t, "a closed store's holder", late.Close(), errdefs.Unavailable)
}

// TestManyAtOnce has holders, readers and deleters on one store at once.
func TestManyAtOnce(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := open(t, dir, 0)
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			h := s.Holder(nil)
			for i := range 30 {
				owner := []pluginwire.Context{slotA, slotB}[(g+i)%2]
				key, shared := fmt.Sprint("k", g, ".", i), "shared"
				data := strings.Repeat(fmt.Sprint(g), i*1000)
				if err := push(h, key, []byte(data), owner); err != nil {
					t.Error(err)
				}
				if err := push(h, shared, []byte("same"), owner); err != nil && !errdefs.Is(err, errdefs.Invalid) {
					t.Error(err)
				}
				wantFile(t, s, key, owner, data)
				if got, err := s.Read(shared, owner); err == nil && string(got) != "same" || err != nil && !errdefs.Is(err, errdefs.NotFound) {
					t.Errorf("%q, %v", got, err)
				}
				for _, k := range []string{key, shared} {
					if err := s.Delete(k, owner); err != nil && i%3 == 0 {
						t.Error(err)
					}
				}
			}
			if err := h.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if left := files(t, dir); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
	if len(s.busy)+len(s.held) != 0 {
		t.Errorf("remembered: %v, %v", s.busy, s.held)
	}
}

// TestModel compares long mixtures of everything with a map.
func TestModel(t *testing.T) {
	t.Parallel()
	base := t.TempDir()
	n := 0
	rapid.Check(t, func(t *rapid.T) {
		n++
		dir := filepath.Join(base, fmt.Sprint(n))
		s, err := Open(Config{Dir: dir, MaxFileBytes: 8})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		type file struct {
			owner pluginwire.Context
			data  string
		}
		type part struct {
			holder, next, amount int
			file
		}
		minted := "ft1_" + strings.Repeat("0", 64)
		keys := []string{minted, "a", "b"}
		owners := []pluginwire.Context{slotA, slotB}
		holders := []*Holder{s.Holder(nil), s.Holder(nil)}
		there := map[string]file{} // by key and, unless minted, owner
		holds := map[string]int{}
		coming := map[string]part{}
		at := func(key string, owner pluginwire.Context) string {
			if key == minted {
				return key
			}
			return key + owner.InstallationUUID
		}
		key := rapid.SampledFrom(keys)
		owner := rapid.SampledFrom(owners)
		t.Repeat(map[string]func(*rapid.T){
			"chunk": func(t *rapid.T) {
				k, from, who := key.Draw(t, "key"), owner.Draw(t, "from"), rapid.IntRange(0, 1).Draw(t, "holder")
				in, busy := coming[k]
				index, amount := 0, rapid.IntRange(1, 4).Draw(t, "amount")
				if busy && rapid.IntRange(0, 4).Draw(t, "right") > 0 {
					index, amount, from, who = in.next, in.amount, in.owner, in.holder
				} else if busy {
					index = rapid.IntRange(0, amount-1).Draw(t, "index")
				}
				data := rapid.StringN(0, 4, 4).Draw(t, "data")
				var want errdefs.Code
				_, taken := there[at(k, from)]
				next := part{who, 1, amount, file{from, data}}
				if busy {
					next = part{who, in.next + 1, amount, file{from, in.data + data}}
				}
				switch {
				case busy && (in.holder != who || in.owner != from || in.amount != amount || in.next != index):
					want = errdefs.Invalid
				case !busy && taken:
					want = errdefs.Invalid
				case len(next.data) > 8:
					want = errdefs.Exhausted
					delete(coming, k)
				case next.next == amount:
					delete(coming, k)
					there[at(k, from)], holds[at(k, from)] = next.file, who
				default:
					coming[k] = next
				}
				if err := holders[who].Chunk(message(k, index, amount, []byte(data)), from); errdefs.CodeOf(err) != want {
					t.Fatalf("%v, want %q", err, want)
				}
			},
			"delete": func(t *rapid.T) {
				k, as := key.Draw(t, "key"), owner.Draw(t, "as")
				if err := s.Delete(k, as); err != nil {
					t.Fatal(err)
				}
				if f, ok := there[at(k, as)]; ok && f.owner == as {
					delete(there, at(k, as))
				}
			},
			"close": func(t *rapid.T) {
				who := rapid.IntRange(0, 1).Draw(t, "holder")
				if err := holders[who].Close(); err != nil {
					t.Fatal(err)
				}
				holders[who] = s.Holder(nil)
				for k, in := range coming {
					if in.holder == who {
						delete(coming, k)
					}
				}
				for k := range there {
					if holds[k] == who {
						delete(there, k)
					}
				}
			},
			"": func(t *rapid.T) {
				for _, k := range keys {
					for _, as := range owners {
						f, ok := there[at(k, as)]
						got, err := s.Read(k, as)
						if ok = ok && f.owner == as; ok != (err == nil) || string(got) != f.data && ok || err != nil && !errdefs.Is(err, errdefs.NotFound) {
							t.Fatalf("%s as %s: %q, %v; want %v", k, as.InstallationUUID, got, err, f)
						}
					}
				}
				if sum := holders[0].Held() + holders[1].Held(); sum != len(there)+len(coming) {
					t.Fatalf("%d held, want %d and %d", sum, len(there), len(coming))
				}
			},
		})
		for _, h := range holders {
			if err := h.Close(); err != nil {
				t.Fatal(err)
			}
		}
		if e, err := os.ReadDir(dir); err != nil || len(e) != 1 {
			t.Fatalf("left: %v, %v", e, err)
		}
	})
}

func FuzzChunk(f *testing.F) {
	f.Add([]byte(message("k", 0, 1, []byte("x"))))
	f.Add([]byte(message("ft1_"+strings.Repeat("0", 64), 3, 7, nil)))
	f.Add([]byte(`{"file_key":"\u006b","chunk_index":0,"chunk_amount":1,"chunk_base64":"\/\/8="}`))
	f.Add([]byte(`{"file_key":"../k","chunk_index":NaN,"chunk_amount":1e3,"chunk_base64":"QQ=="}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := decodeChunk(data)
		if err != nil {
			return
		}
		if checkKey(c.key) != nil || strings.Contains(c.key, "/") || c.index < 0 || c.index >= c.amount {
			t.Errorf("accepted %+v", c)
		}
		var buf [ChunkBytes + 2]byte
		n, err := c.decode(buf[:])
		if err != nil {
			return
		}
		if n > ChunkBytes || n > len(c.text) {
			t.Errorf("%d bytes of %d", n, len(c.text))
		}
	})
}

// TestSweep: what a revoked sender had sent is gone at once, half or whole; nobody
// else's is, and the connection goes on.
func TestSweep(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := open(t, dir, 0)
	revoked := map[pluginwire.Context]bool{}
	h := s.Holder(func(from pluginwire.Context) error {
		if revoked[from] {
			return errdefs.New(errdefs.Denied, "revoked")
		}
		return nil
	})
	for _, from := range []pluginwire.Context{slotA, slotB} {
		must(t, push(h, "whole-"+from.InstallationUUID, []byte("1"), from))
		must(t, h.Chunk(message("half-"+from.InstallationUUID, 0, 2, []byte("2")), from))
	}
	must(t, h.Sweep())
	if n := h.Held(); n != 4 {
		t.Fatalf("%d files are held, not 4: nobody was revoked", n)
	}
	revoked[slotA] = true
	must(t, h.Sweep())
	if n := h.Held(); n != 2 {
		t.Errorf("%d files are held, not the 2 of the other", n)
	}
	if _, err := s.Read("whole-"+slotA.InstallationUUID, slotA); !errdefs.Is(err, errdefs.NotFound) {
		t.Errorf("a revoked sender's file: %v", err)
	}
	must(t, h.Chunk(message("half-"+slotB.InstallationUUID, 1, 2, []byte("3")), slotB))
	if got, err := s.Read("half-"+slotB.InstallationUUID, slotB); err != nil || string(got) != "23" {
		t.Errorf("the other's file: %q, %v", got, err)
	}
	must(t, h.Close())
	must(t, h.Sweep())
	if left := files(t, dir); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}
