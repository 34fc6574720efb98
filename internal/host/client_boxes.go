package host

import (
	"context"
	"io"
	"net/url"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/wire"
)

// PutBox makes a box. Repeating it with an equal spec returns the same box;
// another spec of the same id is a conflict.
func (c *Client) PutBox(ctx context.Context, spec wire.BoxSpec) (wire.BoxInfo, error) {
	var out wire.BoxInfo
	err := c.exchange(ctx, startCall, call{method: "PUT", path: "/v1/boxes/" + url.PathEscape(spec.ID), json: spec, repeatable: true}, &out)
	return out, err
}

// Box returns one box, or not_found.
func (c *Client) Box(ctx context.Context, id string) (wire.BoxInfo, error) {
	var out wire.BoxInfo
	err := c.exchange(ctx, shortCall, call{method: "GET", path: "/v1/boxes/" + url.PathEscape(id)}, &out)
	return out, err
}

// Boxes returns every box of the host.
func (c *Client) Boxes(ctx context.Context) ([]wire.BoxInfo, error) {
	var out []wire.BoxInfo
	err := c.list(ctx, "/v1/boxes", &out)
	return out, err
}

// RemoveBox removes a box and its volumes. Removing one that is not there does
// nothing; while a process lives in it the answer is conflict.
func (c *Client) RemoveBox(ctx context.Context, id string) error {
	return c.exchange(ctx, startCall, call{method: "DELETE", path: "/v1/boxes/" + url.PathEscape(id), repeatable: true}, nil)
}

// PutFiles unpacks a tar below path, which is absolute as seen inside the box and
// lies in one of its volumes. After an error some of the files may have been
// written.
func (c *Client) PutFiles(ctx context.Context, id, path string, tar io.Reader) error {
	return c.exchange(ctx, bulkCall, call{method: "PUT", path: "/v1/boxes/" + url.PathEscape(id) + "/files", query: url.Values{"path": {path}}, stream: tar}, nil)
}

// GetFiles writes the file or directory at path, absolute as seen inside the box
// and in one of its volumes, to w as a tar. The tar's own end marker says whether it is whole:
// a host that fails half-way breaks the connection.
func (c *Client) GetFiles(ctx context.Context, id, path string, w io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, bulkCall)
	defer cancel()
	resp, err := c.do(ctx, call{method: "GET", path: "/v1/boxes/" + url.PathEscape(id) + "/files", query: url.Values{"path": {path}}})
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(w, resp.Body); err != nil {
		return errdefs.Wrap(err, errdefs.Unavailable, "the files could not be read to the end").WithNext("try again")
	}
	return nil
}

// LoadImage unpacks an image from a tar, in OCI layout or docker-save form, and
// returns what was in it. name is given to an image that brings none.
func (c *Client) LoadImage(ctx context.Context, name string, tar io.Reader) ([]wire.ImageInfo, error) {
	var out []wire.ImageInfo
	err := c.exchange(ctx, bulkCall, call{method: "PUT", path: "/v1/images", query: url.Values{"name": {name}}, stream: tar}, &out)
	return out, err
}

// Images returns the images the host has.
func (c *Client) Images(ctx context.Context) ([]wire.ImageInfo, error) {
	var out []wire.ImageInfo
	err := c.list(ctx, "/v1/images", &out)
	return out, err
}

// RemoveImage removes an image; conflict while a box uses it.
func (c *Client) RemoveImage(ctx context.Context, digest string) error {
	return c.exchange(ctx, startCall, call{method: "DELETE", path: "/v1/images/" + url.PathEscape(digest), repeatable: true}, nil)
}
