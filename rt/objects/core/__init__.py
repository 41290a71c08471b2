"""What collections and stores share: persisted objects, serializers, the store protocol."""
