package pluginlegacy

import (
	"crypto/rand"
	"encoding/base64"
	"testing"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
)

// A disk that fills up while a plugin is unpacked costs the attempt, and nothing else.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	need.Disk(t, dir, "size=1m")
	r := newRunner()
	o := begin(t, config(dir, r), runtimeConfig(4))
	t.Cleanup(o.Close)
	mustInstall(t, o, local(pack("toy", "1")))
	big := make([]byte, 2<<20)
	_, _ = rand.Read(big)
	err := o.Install(t.Context(), local(pack("toy", "2", "big", base64.StdEncoding.EncodeToString(big))), new(progress).tell)
	isCode(t, err, errdefs.Exhausted, "no space left")
	if got := onDisk(t, dir); got != "plugins/a__toy 1" || r.version("a/toy") != "1" {
		t.Errorf("%q, %q runs", got, r.version("a/toy"))
	}
	mustInstall(t, o, local(pack("toy", "2")))
}
